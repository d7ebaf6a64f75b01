"""HTTP of tenants, keys and the audit log; and of what everyone may know of themselves."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from aerie_api.auth import Admin, Reader
from aerie_api.engines import LARGEST_NUMBER
from aerie_api.house import House, house_of
from aerie_api.tenants.schemas import (
    ApiKey,
    AuditList,
    FreshKey,
    KeyList,
    Limits,
    Me,
    NewKey,
    NewTenant,
    Rotation,
    Tenant,
    TenantList,
)

router = APIRouter(tags=["tenants"])
Inside = Annotated[House, Depends(house_of)]
Limit = Annotated[int, Query(ge=1, le=100)]


@router.get("/me", operation_id="get_me")
def get_me(caller: Reader, inside: Inside) -> Me:
    """Your tenant, its limits and what it uses; what your key may do."""
    return inside.tenants.me(caller)


@router.post("/tenants", status_code=201, operation_id="create_tenant")
def create_tenant(caller: Admin, inside: Inside, tenant: NewTenant) -> Tenant:
    """Make a tenant."""
    return inside.tenants.create(caller, tenant)


@router.get("/tenants", operation_id="list_tenants")
def list_tenants(caller: Admin, inside: Inside, limit: Limit = 20, after: str | None = None) -> TenantList:
    """Tenants by name."""
    return inside.tenants.list(after, limit)


@router.get("/tenants/{tenant_id}", operation_id="get_tenant")
def get_tenant(caller: Admin, inside: Inside, tenant_id: str) -> Tenant:
    """One tenant."""
    return inside.tenants.get(tenant_id)


@router.patch("/tenants/{tenant_id}", operation_id="limit_tenant")
def limit_tenant(caller: Admin, inside: Inside, tenant_id: str, limits: Limits) -> Tenant:
    """Change limits of a tenant; what is not named stays."""
    return inside.tenants.limit(caller, tenant_id, limits)


@router.post("/keys", status_code=201, operation_id="create_key")
def create_key(caller: Admin, inside: Inside, key: NewKey) -> FreshKey:
    """Make an API key. The answer holds its text, this once."""
    return inside.tenants.create_key(caller, key)


@router.get("/keys", operation_id="list_keys")
def list_keys(
    caller: Admin, inside: Inside, tenant: str | None = None, limit: Limit = 20, after: str | None = None
) -> KeyList:
    """API keys, newest first, those that no longer count included."""
    return inside.tenants.list_keys(tenant, after, limit)


@router.post("/keys/{key_id}/rotate", status_code=201, operation_id="rotate_key")
def rotate_key(caller: Admin, inside: Inside, key_id: str, how: Rotation | None = None) -> FreshKey:
    """Replace an API key; the old one counts a while longer."""
    return inside.tenants.rotate_key(caller, key_id, how or Rotation())


@router.delete("/keys/{key_id}", operation_id="revoke_key")
def revoke_key(caller: Admin, inside: Inside, key_id: str) -> ApiKey:
    """End an API key at once."""
    return inside.tenants.revoke_key(caller, key_id)


@router.get("/audit", operation_id="list_audit")
def list_audit(
    caller: Admin,
    inside: Inside,
    tenant: str | None = None,
    limit: Limit = 20,
    after: Annotated[int | None, Query(ge=0, le=LARGEST_NUMBER)] = None,
) -> AuditList:
    """Who changed what, newest first."""
    return inside.tenants.audit(tenant, after, limit)
