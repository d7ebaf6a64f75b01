"""The rows behind the documents of several jobs, fetched in a few queries whatever their number."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from aerie_api.jobs.documents import Surroundings, job_document
from aerie_api.jobs.history import History
from aerie_api.jobs.repository import JobRepository
from aerie_api.jobs.schemas import Job
from aerie_api.leases.repository import WORKER_GONE_S, UnitRepository, WorkerRepository
from aerie_api.leases.spells import ran_s
from aerie_api.leases.turns import Turns
from aerie_api.tables import Job as JobRow
from aerie_api.tables import Unit
from aerie_api.tenants.repository import TenantRepository
from eagle3_core.jobs.states import JobStatus

WAITING = (JobStatus.QUEUED, JobStatus.RUNNING)
"""States in which something of a job may wait for its turn."""


def documents(session: Session, tenant: str, jobs: Sequence[JobRow], now: float, *, measured: bool) -> list[Job]:
    """The documents of `jobs` of `tenant`; only if `measured` with the last values of their curves, which may be many."""
    repository, ids = JobRepository(session, tenant), [job.id for job in jobs]
    stages, spells = repository.stages_of(ids), UnitRepository(session, tenant).spells(ids)
    units: dict[str, list[Unit]] = {job_id: [] for job_id in ids}
    for unit in UnitRepository(session, tenant).figures_of(ids):
        units[unit.job_id].append(unit)
    fleet = WorkerRepository(session).fleet(now - WORKER_GONE_S)
    waits = any(job.status in WAITING for job in jobs)
    quota = Turns(session).quota(TenantRepository(session).get(tenant), now) if waits else None
    past = past_seconds(session, tenant) if any(job.status == JobStatus.RUNNING for job in jobs) else {}
    return [
        job_document(
            job, stages[job.id], units[job.id],
            Surroundings(
                fleet, repository.ahead_of(job) if job.status in WAITING else 0, past, quota,
                History(session).furthest(job) if measured else None,
                {stage.name: spells.get((job.id, stage.name), []) for stage in stages[job.id]},
            ),
        )
        for job in jobs
    ]  # fmt: skip


def past_seconds(session: Session, tenant: str) -> dict[str, float]:
    """How long each stage ran in the newest job of `tenant` in which a worker ran it."""
    runs = JobRepository(session, tenant).last_runs()
    spells = UnitRepository(session, tenant).spells(set(runs.values()))
    return {name: ran_s(spells.get((job_id, name), []), None) for name, job_id in runs.items()}
