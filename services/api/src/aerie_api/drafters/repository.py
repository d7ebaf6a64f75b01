"""All SQL about drafters, within one tenant."""

from __future__ import annotations

from sqlalchemy import and_, delete, or_, select
from sqlalchemy.orm import Session

from aerie_api.tables import Drafter
from eagle3_core.errors import AerieError


class DrafterMissing(AerieError):
    """There is no such drafter."""

    code, status = "drafter.missing", 404


class DrafterRepository:
    """Drafters of `tenant`, in one transaction."""

    def __init__(self, session: Session, tenant: str) -> None:
        self.session = session
        self.tenant = tenant

    def put(self, drafter: Drafter) -> None:
        """Store a drafter under its name."""
        self.session.merge(drafter)

    def named(self, name: str) -> Drafter | None:
        """The drafter called `name`."""
        return self.session.get(Drafter, (self.tenant, name))

    def forget(self, job_id: str) -> None:
        """Remove what the job `job_id` made."""
        self.session.execute(delete(Drafter).where(Drafter.tenant == self.tenant, Drafter.job_id == job_id))

    def newest_first(self, limit: int, after: str | None = None) -> list[Drafter]:
        """Up to `limit` drafters, older than the one called `after`. Raises DrafterMissing."""
        query = select(Drafter).where(Drafter.tenant == self.tenant)
        if after is not None:
            if (last := self.named(after)) is None:
                raise DrafterMissing(f"no drafter {after!r}", remedy="GET /drafters lists the drafters")
            as_old = and_(Drafter.created_at == last.created_at, Drafter.name > last.name)
            query = query.where(or_(Drafter.created_at < last.created_at, as_old))
        return list(self.session.scalars(query.order_by(Drafter.created_at.desc(), Drafter.name).limit(limit)))
