"""All SQL about jobs and their stages, always within one tenant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from aerie_api.tables import LIVING, Job, StageRow, Unit
from eagle3_core.errors import AerieError

TENANT = "default"
"""The one tenant until there are users; every query already asks for it."""


class JobMissing(AerieError):
    """There is no such job."""

    code, status = "job.missing", 404


class JobRepository:
    """Jobs and stages of `tenant`, in one transaction."""

    def __init__(self, session: Session, tenant: str = TENANT) -> None:
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

    def locked(self, job_id: str) -> Job:
        """The job `job_id`, locked until the transaction ends: whoever decides about a job goes through here."""
        query = self._jobs().where(Job.id == job_id).with_for_update()
        job = self.session.scalar(query, execution_options={"populate_existing": True})
        return self._found(job, job_id)

    def _found(self, job: Job | None, job_id: str) -> Job:
        if job is None:
            raise JobMissing(f"no job {job_id!r}", remedy="GET /jobs lists the jobs")
        return job

    @staticmethod
    def paused(session: Session, *, locked: bool = True) -> list[Job]:
        """The paused jobs of every tenant, oldest first: for what the house itself decides."""
        query = select(Job).where(Job.status == "paused").order_by(Job.number)
        return list(session.scalars(query.with_for_update() if locked else query))

    def living_named(self, name: str) -> Job | None:
        """The living job called `name`."""
        return self.session.scalar(self._jobs().where(Job.name == name, Job.status.in_(LIVING)))

    def page(self, statuses: Sequence[str], after: str | None, limit: int) -> list[Job]:
        """Up to `limit` jobs, newest first, older than the job `after`. Raises JobMissing."""
        query = self._jobs().order_by(Job.number.desc()).limit(limit)
        if statuses:
            query = query.where(Job.status.in_(statuses))
        if after is not None:
            query = query.where(Job.number < self.get(after).number)
        return list(self.session.scalars(query))

    def ahead_of(self, job: Job) -> int:
        """How many living jobs were posted before `job`."""
        query = select(func.count()).select_from(Job).where(Job.tenant == self.tenant)
        return self.session.scalar(query.where(Job.status.in_(LIVING), Job.number < job.number)) or 0

    def stages(self, job_id: str) -> list[StageRow]:
        """The stages of a job, in order."""
        query = select(StageRow).join(Job, Job.id == StageRow.job_id).where(Job.tenant == self.tenant)
        return list(self.session.scalars(query.where(StageRow.job_id == job_id).order_by(StageRow.position)))

    def stages_of(self, job_ids: Sequence[str]) -> dict[str, list[StageRow]]:
        """The stages of several jobs, in order, by job."""
        query = select(StageRow).join(Job, Job.id == StageRow.job_id).where(Job.tenant == self.tenant)
        found: dict[str, list[StageRow]] = {job_id: [] for job_id in job_ids}
        for stage in self.session.scalars(query.where(StageRow.job_id.in_(job_ids)).order_by(StageRow.position)):
            found[stage.job_id].append(stage)
        return found

    def past_seconds(self) -> dict[str, float]:
        """How long each stage took in the newest job in which a worker ran it."""
        ran = select(Unit.job_id).where(Unit.job_id == StageRow.job_id, Unit.stage == StageRow.name, Unit.attempt > 0)
        query = (
            select(StageRow.name, StageRow.finished_at - StageRow.started_at)
            .join(Job, Job.id == StageRow.job_id)
            .where(Job.tenant == self.tenant, StageRow.state == "succeeded", ran.exists())
            .order_by(Job.number.desc())
            .limit(200)
        )
        newest_last = reversed(self.session.execute(query).all())
        return {name: seconds for name, seconds in newest_last if seconds is not None}
