"""All SQL about drafters, within one tenant."""

from __future__ import annotations

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from aerie_api.tables import Drafter


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
        """Up to `limit` drafters, older than the one called `after`."""
        query = select(Drafter).where(Drafter.tenant == self.tenant)
        if after is not None and (last := self.named(after)) is not None:
            query = query.where(Drafter.created_at < last.created_at)
        return list(self.session.scalars(query.order_by(Drafter.created_at.desc(), Drafter.name).limit(limit)))
