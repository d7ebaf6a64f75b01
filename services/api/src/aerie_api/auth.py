"""Who sends a request, and what they may do.

A request carries an API key, `aerie_<id>_<secret>`, as its bearer token. The key belongs to a tenant, and every query is
limited to that tenant, so another tenant's objects answer 404 and not 403. Without keys only the embedded house is served,
on the loopback address: whoever can reach that is a user of this machine. Each route names the scope that it needs; a route
that names none refuses everybody.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from eagle3_core.errors import AerieError

Scope = Literal["jobs:read", "jobs:write", "deploy", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
DEFAULT_TENANT = "default"
"""The tenant of the embedded house, and of the first admin key."""
_KEY = re.compile(r"aerie_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")


class Unauthenticated(AerieError):
    """The request carries no valid API key."""

    code, status = "auth.key", 401


class ScopeMissing(AerieError):
    """The API key may not do this."""

    code, status = "auth.scope", 403


@dataclass(frozen=True)
class Caller:
    """Whoever sent a request."""

    tenant: str
    scopes: frozenset[str]
    key_id: str | None
    """Null for the user of an embedded house."""
    request_id: str = ""


def local(request_id: str = "") -> Caller:
    """The user of an embedded house, who may do everything."""
    return Caller(DEFAULT_TENANT, frozenset(SCOPES), None, request_id)


CALLER: ContextVar[Caller | None] = ContextVar("aerie_caller", default=None)
"""Who the code that runs now serves; null in the house's own work and in that of workers, which know every tenant."""


def new_key() -> tuple[str, str, str]:
    """Id, full text and stored hash of a new key. The text is shown once and kept nowhere."""
    key_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    return key_id, f"aerie_{key_id}_{secret}", secret_hash(secret)


def take_apart(text: str) -> tuple[str, str] | None:
    """Id and secret of a key; None for what is none."""
    found = _KEY.fullmatch(text)
    return (found[1], found[2]) if found else None


def secret_hash(secret: str) -> str:
    """How a secret is stored. It is 256 random bits, so a plain hash cannot be searched."""
    return hashlib.sha256(secret.encode()).hexdigest()


def same_secret(secret: str, stored: str) -> bool:
    """Whether `secret` is the one behind `stored`; the time it takes tells nothing."""
    return hmac.compare_digest(secret_hash(secret), stored)


_DESCRIBED = HTTPBearer(
    scheme_name="key", auto_error=False,
    description="An API key, `aerie_<id>_<secret>`. The embedded house, on the loopback address, serves without one.",
)  # fmt: skip
"""For the OpenAPI document only: keys are looked up by `tenants.gate`, before a body is read."""


def needs(scope: Scope) -> Callable[..., Awaitable[Caller]]:
    """The dependency of a route that takes `scope`. Raises ScopeMissing, Unauthenticated."""

    async def caller(
        request: Request, _described: Annotated[HTTPAuthorizationCredentials | None, Security(_DESCRIBED)]
    ) -> Caller:
        found: Caller | None = request.scope.get("aerie_caller")
        if found is None:
            raise Unauthenticated("the request carries no API key", remedy="send Authorization: Bearer aerie_...")
        if scope not in found.scopes:
            raise ScopeMissing(
                f"this takes the scope {scope!r}, the key has {_listed(found.scopes)}",
                remedy="use a key with that scope; an admin makes one with `aerie keys create`",
            )
        return found

    caller.__dict__["aerie_scope"] = scope
    return caller


def _listed(scopes: Iterable[str]) -> str:
    return ", ".join(sorted(scopes)) or "none"


Reader = Annotated[Caller, Security(needs("jobs:read"), scopes=["jobs:read"])]
Writer = Annotated[Caller, Security(needs("jobs:write"), scopes=["jobs:write"])]
Deployer = Annotated[Caller, Security(needs("deploy"), scopes=["deploy"])]
Admin = Annotated[Caller, Security(needs("admin"), scopes=["admin"])]
