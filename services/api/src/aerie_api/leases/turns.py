"""Whose turn it is: a worker that is free goes to the tenant that has least, not to the one that asked most.

Among the tenants with work for the worker, the one with the fewest running units per weight comes first; of two with
as many, the one that was served longer ago, so that a single worker goes round. Within a tenant the order is priority,
then age, then the order of stages and slices: a job's priority moves it among its own tenant's jobs and takes nothing
from others. A tenant at its quota is passed over.

Each question is a probe of a partial index for each tenant or queue, so ten thousand waiting units of one tenant cost
no more than ten.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from sqlalchemy import Select, bindparam, exists, func, literal, select, union_all
from sqlalchemy.orm import Session

from aerie_api.tables import Job, Tenant, Unit
from aerie_api.tenants.repository import UsageRepository
from eagle3_core.jobs.states import JobStatus, UnitState

ORDER = {"rank": Unit.rank, "job": Unit.job_number, "stage": Unit.position, "slice": Unit.index}
Place = tuple[str, str]
"""Tenant and job."""


@dataclass(frozen=True)
class Quota:
    """How a tenant stands against its limits."""

    gpu_hours: float | None
    """Used of the last 30 days; null where nothing limits them."""
    gpu_hours_limit: float | None
    running_jobs: int | None
    """Null where nothing limits them."""
    running_jobs_limit: int | None

    @property
    def nothing_more(self) -> str | None:
        """Why no unit at all may start."""
        if self.gpu_hours is None or self.gpu_hours_limit is None or self.gpu_hours < self.gpu_hours_limit:
            return None
        return f"quota: {self.gpu_hours:.1f} of {self.gpu_hours_limit:g} GPU-hours of the last 30 days are used"

    @property
    def no_further_job(self) -> str | None:
        """Why no job may start that has not started yet."""
        if self.running_jobs is None or self.running_jobs_limit is None or self.running_jobs < self.running_jobs_limit:
            return None
        return f"quota: {self.running_jobs} of {self.running_jobs_limit} jobs run at the same time"

    def stands_in_the_way(self, *, started: bool) -> str | None:
        """Why a job does not go on that has `started`, or has not."""
        return self.nothing_more or (None if started else self.no_further_job)


class Turns:
    """Who is next, in one transaction. The house asks this for all tenants."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def next_place(self, queues: Collection[str], now: float) -> Place | None:
        """Tenant and job of the unit to work on next. No row of theirs is loaded: their job is not locked yet."""
        for tenant in self._tenants(queues, now):
            quota = self.quota(tenant, now)
            if quota.nothing_more is None:
                job = self._first_job(tenant.id, queues, now, started_only=quota.no_further_job is not None)
                if job is not None:
                    return tenant.id, job
        return None

    def quota(self, tenant: Tenant, now: float) -> Quota:
        """How `tenant` stands against its limits. Only what is limited is counted."""
        used = UsageRepository(self.session, tenant.id)
        return Quota(
            None if tenant.gpu_hours is None else used.gpu_seconds(now) / 3600, tenant.gpu_hours,
            None if tenant.max_running_jobs is None else used.jobs([JobStatus.RUNNING]), tenant.max_running_jobs,
        )  # fmt: skip

    def _tenants(self, queues: Collection[str], now: float) -> list[Tenant]:
        """The tenants with something to do in `queues`, the one whose turn it is first."""
        return list(self.session.scalars(_tenants_in_turn(), {"queues": sorted(queues), "now": now}))

    def _first_job(self, tenant: str, queues: Collection[str], now: float, *, started_only: bool) -> str | None:
        query = _first_job_of(tuple(sorted(queues)), started_only=started_only)
        return self.session.scalar(query, {"tenant": tenant, "now": now})


# Every claim asks these, and building such a question takes SQLAlchemy longer than the database takes to answer it.


@cache
def _tenants_in_turn() -> Select[Tenant]:
    """The tenants with something to do in `queues` at `now`, the one whose turn it is first."""
    queues, now = bindparam("queues", expanding=True), bindparam("now")
    mine = Unit.tenant == Tenant.id
    waiting = exists().where(mine, Unit.state == UnitState.QUEUED, Unit.queue.in_(queues), Unit.not_before <= now)
    running = select(func.count()).where(mine, Unit.state == UnitState.RUNNING, Unit.queue.in_(queues))
    served = select(func.max(Unit.started_at)).where(mine)
    share = running.correlate(Tenant).scalar_subquery() * literal(1.0) / Tenant.weight
    last = func.coalesce(served.correlate(Tenant).scalar_subquery(), 0.0)
    query = select(Tenant).where(waiting.correlate(Tenant)).order_by(share, last, Tenant.id)
    return query.execution_options(populate_existing=True)


@lru_cache(maxsize=64)
def _first_job_of(queues: tuple[str, ...], *, started_only: bool) -> Select[str]:
    """The job of the unit that is next for `tenant` in `queues` at `now`."""
    tenant, now = bindparam("tenant"), bindparam("now")

    def first_in(queue: str) -> Select[*tuple[Any, ...]]:
        query = select(Unit.job_id, *(column.label(name) for name, column in ORDER.items())).where(
            Unit.tenant == tenant, Unit.queue == queue, Unit.state == UnitState.QUEUED, Unit.not_before <= now
        )
        if started_only:
            running = select(Job.id).where(Job.tenant == tenant, Job.status == JobStatus.RUNNING)
            query = query.where(Unit.job_id.in_(running))
        return query.order_by(*ORDER.values()).limit(1)

    any_queue = union_all(*(select(first_in(queue).subquery()) for queue in queues)).subquery()
    return select(any_queue.c.job_id).order_by(*(any_queue.c[name] for name in ORDER)).limit(1)
