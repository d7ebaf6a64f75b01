"""All SQL about jobs and their stages, always within one tenant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Select, and_, delete, func, or_, select
from sqlalchemy.orm import Session

from aerie_api.tables import LIVING, Job, StageRow, Unit
from eagle3_core.errors import AerieError
from eagle3_core.jobs.states import JobStatus


class JobMissing(AerieError):
    """There is no such job."""

    code, status = "job.missing", 404


def missing(job_id: str) -> JobMissing:
    """What is said of a job that is not there."""
    return JobMissing(f"no job {job_id!r}", remedy="`aerie status` and GET /jobs list the jobs")


@dataclass(frozen=True)
class Wanted:
    """Which jobs a list holds. What is null does not matter."""

    statuses: Sequence[str] = ()
    name: str | None = None
    stage: str | None = None
    created_after: float | None = None
    created_before: float | None = None


class JobRepository:
    """Jobs and stages of `tenant`, in one transaction."""

    def __init__(self, session: Session, tenant: str) -> None:
        self.session = session
        self.tenant = tenant

    def _jobs(self) -> Select[Job]:
        return select(Job).where(Job.tenant == self.tenant)

    def add(self, job: Job, stages: Iterable[StageRow]) -> None:
        """Store a new job with its stages."""
        self.session.add(job)
        self.session.flush()
        self.session.add_all(stages)
        self.session.flush()

    def get(self, job_id: str) -> Job:
        """The job `job_id`. Raises JobMissing."""
        job = self.session.scalar(self._jobs().where(Job.id == job_id))
        return self._found(job, job_id)

    def version_of(self, job_id: str) -> int:
        """The version of the job `job_id`, and nothing else of it. Raises JobMissing."""
        version = self.session.scalar(select(Job.version).where(Job.tenant == self.tenant, Job.id == job_id))
        if version is None:
            raise missing(job_id)
        return version

    def locked(self, job_id: str) -> Job:
        """The job `job_id`, locked until the transaction ends: whoever decides about a job goes through here."""
        query = self._jobs().where(Job.id == job_id).with_for_update()
        job = self.session.scalar(query, execution_options={"populate_existing": True})
        return self._found(job, job_id)

    def _found(self, job: Job | None, job_id: str) -> Job:
        if job is None:
            raise missing(job_id)
        return job

    @staticmethod
    def paused(session: Session, *, locked: bool = True) -> list[Job]:
        """The paused jobs of every tenant, oldest first: for what the house itself decides."""
        query = select(Job).where(Job.status == "paused").order_by(Job.number)
        return list(session.scalars(query.with_for_update() if locked else query))

    def living_named(self, name: str) -> Job | None:
        """The living job called `name`."""
        return self.session.scalar(self._jobs().where(Job.name == name, Job.status.in_(LIVING)))

    def page(self, wanted: Wanted, after: str | None, limit: int) -> list[Job]:
        """Up to `limit` jobs, newest first, older than the job `after`. Raises JobMissing."""
        query = self._jobs().order_by(Job.number.desc()).limit(limit)
        if wanted.statuses:
            query = query.where(Job.status.in_(wanted.statuses))
        if wanted.name is not None:
            query = query.where(Job.name == wanted.name)
        if wanted.stage is not None:
            query = query.where(Job.stage == wanted.stage)
        if wanted.created_after is not None:
            query = query.where(Job.created_at > wanted.created_after)
        if wanted.created_before is not None:
            query = query.where(Job.created_at < wanted.created_before)
        if after is not None:
            query = query.where(Job.number < self.get(after).number)
        return list(self.session.scalars(query))

    def ahead_of(self, job: Job) -> int:
        """How many jobs of the tenant go before `job`: living ones that nobody has paused."""
        going = [status for status in LIVING if status != JobStatus.PAUSED]
        query = select(func.count()).select_from(Job).where(Job.tenant == self.tenant, Job.status.in_(going))
        before = or_(Job.rank < job.rank, and_(Job.rank == job.rank, Job.number < job.number))
        return self.session.scalar(query.where(before)) or 0

    def delete(self, job: Job) -> None:
        """Remove a job and all that hangs on it."""
        self.session.execute(delete(Job).where(Job.tenant == self.tenant, Job.id == job.id))

    def stages(self, job_id: str) -> list[StageRow]:
        """The stages of a job, in order."""
        query = select(StageRow).where(StageRow.tenant == self.tenant)
        return list(self.session.scalars(query.where(StageRow.job_id == job_id).order_by(StageRow.position)))

    def stages_of(self, job_ids: Sequence[str]) -> dict[str, list[StageRow]]:
        """The stages of several jobs, in order, by job."""
        query = select(StageRow).where(StageRow.tenant == self.tenant)
        found: dict[str, list[StageRow]] = {job_id: [] for job_id in job_ids}
        for stage in self.session.scalars(query.where(StageRow.job_id.in_(job_ids)).order_by(StageRow.position)):
            found[stage.job_id].append(stage)
        return found

    def last_runs(self) -> dict[str, str]:
        """The newest job in which a worker ran each stage to its end, by stage."""
        here = and_(Unit.tenant == self.tenant, Unit.job_id == StageRow.job_id, Unit.stage == StageRow.name)
        ran = select(Unit.job_id).where(here, Unit.attempt > 0)
        query = (
            select(StageRow.name, StageRow.job_id)
            .join(Job, Job.id == StageRow.job_id)
            .where(
                Job.tenant == self.tenant, StageRow.tenant == self.tenant, StageRow.state == "succeeded", ran.exists()
            )
            .order_by(Job.number.desc())
            .limit(200)
        )
        newest_last = reversed(self.session.execute(query).all())
        return {name: job_id for name, job_id in newest_last}
