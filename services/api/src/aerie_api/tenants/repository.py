"""All SQL about tenants, keys, what tenants used, and the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import Session

from aerie_api.auth import Caller
from aerie_api.db import upsert
from aerie_api.tables import ApiKey, Attempt, AuditEntry, Job, Tenant, Usage
from eagle3_core.errors import AerieError

DAY_S = 86400.0
WINDOW_DAYS = 30
"""Days over which GPU time is counted."""


class TenantMissing(AerieError):
    """There is no such tenant."""

    code, status = "tenant.missing", 404


class KeyMissing(AerieError):
    """There is no such API key."""

    code, status = "key.missing", 404


class TenantRepository:
    """Tenants, for the operator and for the house itself."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def get(self, tenant: str) -> Tenant:
        """The tenant `tenant`. Raises TenantMissing."""
        return self._found(self.session.get(Tenant, tenant), tenant)

    def locked(self, tenant: str) -> Tenant:
        """The same, locked until the transaction ends. Lock a job before its tenant, never after."""
        query = select(Tenant).where(Tenant.id == tenant).with_for_update()
        return self._found(self.session.scalar(query, execution_options={"populate_existing": True}), tenant)

    def _found(self, row: Tenant | None, tenant: str) -> Tenant:
        if row is None:
            raise TenantMissing(f"no tenant {tenant!r}", remedy="GET /tenants lists them; POST /tenants makes one")
        return row

    def add(self, tenant: Tenant) -> bool:
        """Store a new tenant. False if there is one of this name."""
        values = {c.key: getattr(tenant, c.key) for c in Tenant.__table__.columns}
        new = upsert(self.session, Tenant).values(**values).on_conflict_do_nothing().returning(Tenant.id)
        return self.session.scalar(new) is not None

    def page(self, after: str | None, limit: int) -> list[Tenant]:
        """Up to `limit` tenants, by name, after `after`."""
        query = select(Tenant).order_by(Tenant.id).limit(limit)
        return list(self.session.scalars(query if after is None else query.where(Tenant.id > after)))


def is_over(key: ApiKey, now: float) -> bool:
    """Whether a key has ended: revoked, or expired."""
    return key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= now)


class KeyRepository:
    """API keys, for the operator and for whoever looks one up."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def find(self, key_id: str) -> ApiKey | None:
        """The key `key_id`, whether it still counts or not."""
        return self.session.get(ApiKey, key_id)

    def locked(self, key_id: str) -> ApiKey:
        """The key `key_id`, locked. Raises KeyMissing."""
        query = select(ApiKey).where(ApiKey.id == key_id).with_for_update()
        return self._found(self.session.scalar(query, execution_options={"populate_existing": True}), key_id)

    def _found(self, row: ApiKey | None, key_id: str) -> ApiKey:
        if row is None:
            raise KeyMissing(f"no API key {key_id!r}", remedy="GET /keys lists them")
        return row

    def page(self, tenant: str | None, after: str | None, limit: int) -> list[ApiKey]:
        """Up to `limit` keys, newest first, older than `after`. Raises KeyMissing."""
        query = select(ApiKey).order_by(ApiKey.created_at.desc(), ApiKey.id).limit(limit)
        if tenant is not None:
            query = query.where(ApiKey.tenant == tenant)
        if after is not None:
            last = self._found(self.find(after), after)
            as_old = and_(ApiKey.created_at == last.created_at, ApiKey.id > last.id)
            query = query.where(or_(ApiKey.created_at < last.created_at, as_old))
        return list(self.session.scalars(query))

    def any_admin(self, now: float) -> bool:
        """Whether some key with the scope `admin` counts."""
        query = select(ApiKey).where(ApiKey.revoked_at.is_(None))
        return any("admin" in key.scopes and (key.expires_at or now + 1) > now for key in self.session.scalars(query))


class UsageRepository:
    """What a tenant uses, and has used."""

    def __init__(self, session: Session, tenant: str) -> None:
        self.session = session
        self.tenant = tenant

    def add(self, now: float, seconds: float, gpus: int) -> None:
        """Count an attempt that ended now after `seconds` on `gpus` GPUs."""
        new = upsert(self.session, Usage).values(
            tenant=self.tenant, day=int(now // DAY_S), unit_seconds=seconds, gpu_seconds=seconds * gpus
        )
        more = {name: getattr(Usage, name) + new.excluded[name] for name in ("unit_seconds", "gpu_seconds")}
        self.session.execute(new.on_conflict_do_update(index_elements=["tenant", "day"], set_=more))

    def gpu_seconds(self, now: float) -> float:
        """GPU time of the last 30 days, that of running attempts included."""
        first = int(now // DAY_S) - WINDOW_DAYS + 1
        over = select(func.sum(Usage.gpu_seconds)).where(Usage.tenant == self.tenant, Usage.day >= first)
        running = select(func.sum((now - Attempt.started_at) * Attempt.gpus)).where(
            Attempt.tenant == self.tenant, Attempt.ended_at.is_(None), Attempt.gpus > 0
        )
        return (self.session.scalar(over) or 0.0) + (self.session.scalar(running) or 0.0)

    def jobs(self, statuses: Sequence[str]) -> int:
        """How many jobs of the tenant are in one of `statuses`."""
        query = select(func.count()).select_from(Job).where(Job.tenant == self.tenant, Job.status.in_(statuses))
        return self.session.scalar(query) or 0


class AuditRepository:
    """Who changed what. Entries are written in the transaction of the change, so neither is there without the other."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def note(self, caller: Caller, at: float, action: str, target: str, **data: Any) -> None:
        """Add an entry."""
        self.session.add(
            AuditEntry(at=at, tenant=caller.tenant, key_id=caller.key_id, request_id=caller.request_id, action=action,
                       target=target, data=data)
        )  # fmt: skip

    def page(self, tenant: str | None, after: int | None, limit: int) -> list[AuditEntry]:
        """Up to `limit` entries, newest first, older than number `after`."""
        query = select(AuditEntry).order_by(AuditEntry.number.desc()).limit(limit)
        if tenant is not None:
            query = query.where(AuditEntry.tenant == tenant)
        if after is not None:
            query = query.where(AuditEntry.number < after)
        return list(self.session.scalars(query))
