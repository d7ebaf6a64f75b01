"""What the operator does with tenants and keys, and what everyone may know of their own tenant."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.orm import Session

from aerie_api.auth import SCOPES, Caller, new_key
from aerie_api.db import Database, tell
from aerie_api.storage.repository import StorageRepository
from aerie_api.tables import LIVING, ApiKey, AuditEntry, Tenant
from aerie_api.tenants import schemas
from aerie_api.tenants.repository import (
    AuditRepository,
    KeyRepository,
    TenantRepository,
    UsageRepository,
    is_over,
)
from eagle3_core.errors import AerieError


class TenantExists(AerieError):
    """There is a tenant of this name."""

    code, status = "tenant.exists", 409


class KeyOver(AerieError):
    """The API key is revoked or expired."""

    code, status = "key.over", 409


class TenantService:
    """Tenants, keys, audit. The caller's scope was checked by the route."""

    def __init__(self, db: Database, clock: Callable[[], float]) -> None:
        self._db = db
        self._clock = clock

    # -- tenants

    def create(self, caller: Caller, wanted: schemas.NewTenant) -> schemas.Tenant:
        """Make a tenant. Raises TenantExists."""
        now = self._clock()
        with self._db.write() as session:
            limits = wanted.model_dump(exclude={"id"})
            if not TenantRepository(session).add(Tenant(id=wanted.id, created_at=now, **limits)):
                raise TenantExists(f"there is a tenant {wanted.id!r}", remedy="choose another name", pointer="/id")
            AuditRepository(session).note(caller, now, "tenant.create", wanted.id, **limits)
            return self._shown(session, TenantRepository(session).get(wanted.id))

    def limit(self, caller: Caller, tenant: str, limits: schemas.Limits) -> schemas.Tenant:
        """Change a tenant's limits. Raises TenantMissing."""
        now, changes = self._clock(), limits.model_dump(exclude_unset=True)
        with self._db.write() as session:
            row = TenantRepository(session).locked(tenant)
            for name, value in changes.items():
                setattr(row, name, value)
            AuditRepository(session).note(caller, now, "tenant.limit", tenant, **changes)
            tell(session, "work")
            tell(session, "room")
            session.flush()
            return self._shown(session, row)

    def get(self, tenant: str) -> schemas.Tenant:
        """A tenant. Raises TenantMissing."""
        with self._db.read() as session:
            return self._shown(session, TenantRepository(session).get(tenant))

    def me(self, caller: Caller) -> schemas.Me:
        """The caller's own tenant and rights."""
        return schemas.Me(
            tenant=self.get(caller.tenant), scopes=[s for s in SCOPES if s in caller.scopes], key=caller.key_id
        )

    def list(self, after: str | None, limit: int) -> schemas.TenantList:
        """A page of tenants."""
        with self._db.read() as session:
            rows = TenantRepository(session).page(after, limit + 1)
            data = [self._shown(session, row) for row in rows[:limit]]
        return schemas.TenantList(
            data=data, has_more=len(rows) > limit,
            first_id=data[0].id if data else None, last_id=data[-1].id if data else None,
        )  # fmt: skip

    def _shown(self, session: Session, row: Tenant) -> schemas.Tenant:
        used, held = UsageRepository(session, row.id), StorageRepository(session).bytes_by_stage(row.id)
        usage = schemas.UsageNow(
            running_jobs=used.jobs(["running"]), living_jobs=used.jobs(LIVING),
            gpu_hours=round(used.gpu_seconds(self._clock()) / 3600, 6), store_bytes=sum(held.values()),
        )  # fmt: skip
        limits = schemas.Limits(**{name: getattr(row, name) for name in schemas.Limits.model_fields})
        return schemas.Tenant(id=row.id, created_at=row.created_at, limits=limits, usage=usage)

    # -- keys

    def create_key(self, caller: Caller, wanted: schemas.NewKey) -> schemas.FreshKey:
        """Make a key; its text is in the answer and nowhere else. Raises TenantMissing."""
        with self._db.write() as session:
            TenantRepository(session).get(wanted.tenant)
            scopes = [s for s in SCOPES if s in wanted.scopes]
            fresh = self._fresh(session, wanted.name, wanted.tenant, scopes, wanted.expires_in_s)
            said = {"tenant": wanted.tenant, "scopes": scopes, "expires_at": fresh.expires_at}
            AuditRepository(session).note(caller, self._clock(), "key.create", fresh.id, **said)
            return fresh

    def rotate_key(self, caller: Caller, key_id: str, how: schemas.Rotation) -> schemas.FreshKey:
        """Replace a key by one that may do the same; the old one counts a while longer. Raises KeyMissing, KeyOver."""
        now = self._clock()
        with self._db.write() as session:
            old = KeyRepository(session).locked(key_id)
            if is_over(old, now):
                raise KeyOver(f"the API key {key_id} no longer counts", remedy="make a new key")
            end = now + how.overlap_s
            old.expires_at = end if old.expires_at is None else min(end, old.expires_at)
            fresh = self._fresh(session, old.name, old.tenant, old.scopes, how.expires_in_s)
            AuditRepository(session).note(caller, now, "key.rotate", key_id, new=fresh.id, ends_at=old.expires_at)
            tell(session, "news")  # streams that it opened
            return fresh

    def revoke_key(self, caller: Caller, key_id: str) -> schemas.ApiKey:
        """End a key at once. Again changes nothing. Raises KeyMissing."""
        now = self._clock()
        with self._db.write() as session:
            key = KeyRepository(session).locked(key_id)
            if key.revoked_at is None:
                key.revoked_at = now
                AuditRepository(session).note(caller, now, "key.revoke", key_id)
                tell(session, "news")  # streams that it opened
            return _key(key)

    def list_keys(self, tenant: str | None, after: str | None, limit: int) -> schemas.KeyList:
        """A page of keys."""
        with self._db.read() as session:
            rows = KeyRepository(session).page(tenant, after, limit + 1)
        data = [_key(row) for row in rows[:limit]]
        return schemas.KeyList(
            data=data, has_more=len(rows) > limit,
            first_id=data[0].id if data else None, last_id=data[-1].id if data else None,
        )  # fmt: skip

    def _fresh(
        self, session: Session, name: str, tenant: str, scopes: list[str], expires_in_s: float | None
    ) -> schemas.FreshKey:
        now = self._clock()
        key_id, text, hashed = new_key()
        row = ApiKey(
            id=key_id, tenant=tenant, name=name, secret_hash=hashed, scopes=list(scopes), created_at=now,
            expires_at=None if expires_in_s is None else now + expires_in_s, revoked_at=None, last_used_at=None,
        )  # fmt: skip
        session.add(row)
        return schemas.FreshKey(**_key(row).model_dump(), secret=text)

    # -- audit

    def audit(self, tenant: str | None, after: int | None, limit: int) -> schemas.AuditList:
        """A page of the audit log."""
        with self._db.read() as session:
            rows = AuditRepository(session).page(tenant, after, limit + 1)
        data = [_entry(row) for row in rows[:limit]]
        return schemas.AuditList(
            data=data, has_more=len(rows) > limit,
            first_id=data[0].id if data else None, last_id=data[-1].id if data else None,
        )  # fmt: skip


def _key(row: ApiKey) -> schemas.ApiKey:
    return schemas.ApiKey.model_validate(
        {name: getattr(row, name) for name in schemas.ApiKey.model_fields if name != "object"}
    )


def _entry(row: AuditEntry) -> schemas.AuditEntry:
    return schemas.AuditEntry(
        id=row.number, at=row.at, tenant=row.tenant, key=row.key_id, request_id=row.request_id, action=row.action,
        target=row.target, data=row.data,
    )  # fmt: skip
