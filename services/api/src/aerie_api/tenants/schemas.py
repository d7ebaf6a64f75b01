"""Tenants, keys and the audit log as they go over the wire. Times are seconds since the epoch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from aerie_api.auth import Scope
from eagle3_core import patterns

TenantName = Annotated[str, Field(pattern=patterns.TENANT_NAME)]
KeyName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f]+$")]
LONGEST_LIFE_S = 10 * 366 * 86400.0
Lifetime = Annotated[FiniteFloat, Field(gt=0, le=LONGEST_LIFE_S)]


class Closed(BaseModel):
    """A document that takes no unknown fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Limits(Closed):
    """What a tenant may use. Null = as much as there is."""

    weight: Annotated[FiniteFloat, Field(ge=0.01, le=100)] = 1.0
    """Share of the workers, relative to the other tenants that have work waiting."""

    max_running_jobs: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Jobs of which units may run at the same time; further ones wait."""

    max_living_jobs: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Jobs that may wait, run or be paused; a further post is refused."""

    gpu_hours: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """GPU time of the last 30 days, after which nothing more is started until the oldest day falls out."""

    store_bytes: Annotated[int, Field(ge=0, le=1 << 60)] | None = None
    """Bytes that committed results may hold in the store; over it idle states go first, then jobs wait until there is room.
    Null = what `AERIE_TENANT_STORE_BYTES` gives everybody."""


class NewTenant(Limits):
    """A tenant to be."""

    id: TenantName


class UsageNow(BaseModel):
    """What a tenant uses."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    running_jobs: int
    living_jobs: int
    gpu_hours: float
    """Of the last 30 days, running units included."""
    store_bytes: int
    """What committed results hold; `/storage` tells it by stage."""


class Tenant(BaseModel):
    """Somebody whose jobs, data and drafters nobody else sees."""

    object: Literal["tenant"] = "tenant"
    id: str
    created_at: float
    limits: Limits
    usage: UsageNow


class TenantList(BaseModel):
    """Tenants by name."""

    object: Literal["list"] = "list"
    data: list[Tenant]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Me(BaseModel):
    """Whoever asks."""

    object: Literal["caller"] = "caller"
    tenant: Tenant
    scopes: list[Scope]
    key: str | None


class NewKey(Closed):
    """An API key to be."""

    name: KeyName
    """What it is for."""

    tenant: TenantName = "default"
    scopes: Annotated[list[Scope], Field(min_length=1)]
    expires_in_s: Lifetime | None = None
    """Null = until it is revoked."""


class Rotation(Closed):
    """How an API key is replaced."""

    overlap_s: Annotated[FiniteFloat, Field(ge=0, le=LONGEST_LIFE_S)] = 24 * 3600.0
    """How long the old key still counts, so that its users can change over."""

    expires_in_s: Lifetime | None = None
    """Life of the new key. Null = until it is revoked."""


class ApiKey(BaseModel):
    """An API key; never its secret."""

    object: Literal["key"] = "key"
    id: str
    name: str
    tenant: str
    scopes: list[Scope]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


class FreshKey(ApiKey):
    """A key that was just made."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    secret: str
    """The whole key, as requests carry it. It is shown this once."""


class KeyList(BaseModel):
    """Keys, newest first."""

    object: Literal["list"] = "list"
    data: list[ApiKey]
    has_more: bool
    first_id: str | None
    last_id: str | None


class AuditEntry(BaseModel):
    """Something that somebody changed."""

    object: Literal["audit.entry"] = "audit.entry"
    id: int
    at: float
    tenant: str
    key: str | None
    request_id: str
    action: str
    target: str
    data: dict[str, Any]


class AuditList(BaseModel):
    """Entries, newest first."""

    object: Literal["list"] = "list"
    data: list[AuditEntry]
    has_more: bool
    first_id: int | None
    last_id: int | None
