"""What people do with jobs: post, plan, read, cancel, retry. Owns the transactions; the lease machinery does the rest."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from aerie_api.auth import Caller
from aerie_api.db import Database, tell
from aerie_api.drafters.repository import DrafterRepository
from aerie_api.jobs.gathering import documents
from aerie_api.jobs.history import History
from aerie_api.jobs.idempotency import Idempotency, Owned
from aerie_api.jobs.repository import JobRepository, Wanted
from aerie_api.jobs.revival import forget_lost, lost, outputs_of, revive
from aerie_api.jobs.schemas import Job, JobList, JobPlan, PlannedStage
from aerie_api.jobs.tags import Changed, Ended, Shown, matches
from aerie_api.jobs.waiting import unserved
from aerie_api.leases.endings import drop, finish_cancel, move
from aerie_api.leases.pausing import by_person, pause, resume
from aerie_api.leases.planner import Planner
from aerie_api.leases.repository import WORKER_GONE_S, UnitRepository, WorkerRepository
from aerie_api.leases.vetting import Vetting
from aerie_api.tables import LIVING
from aerie_api.tables import Job as JobRow
from aerie_api.tenants.repository import AuditRepository, TenantRepository, UsageRepository
from eagle3_core.data.sources import roots_of
from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import STAGES, queue_of, reads_of
from eagle3_core.jobs.spec import JobSpec, parse_job
from eagle3_core.jobs.states import IllegalMove, JobStatus, UnitState
from eagle3_core.telemetry import logs, traces


class NameInUse(AerieError):
    """A living job or a finished drafter has this name."""

    code, status = "drafter.name_in_use", 409


class QuotaReached(AerieError):
    """The tenant has as many jobs as it may."""

    code, status = "quota.jobs", 429


class Preflighted(Protocol):
    """What a look at verifier and data found, before any compute."""

    @property
    def sources(self) -> Mapping[str, str]:
        """Digests: of the verifier under `verifier`, of each dataset under its URI."""
        ...

    @property
    def warnings(self) -> Sequence[str]:
        """What is odd but no reason to refuse."""
        ...

    @property
    def train_peak_bytes(self) -> int:
        """Most memory that training takes."""
        ...


Preflight = Callable[[JobSpec, Sequence[Path]], Preflighted]


class JobService:
    """Jobs of a tenant."""

    def __init__(
        self, db: Database, planner: Planner, vetting: Vetting, idempotency: Idempotency, preflight: Preflight,
        roots: Sequence[Path], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._db = db
        self._planner = planner
        self._vetting = vetting
        self._idempotency = idempotency
        self._preflight = preflight
        self._roots = tuple(roots)
        self._clock = clock
        self._ended = Ended()
        self._bound: Caller | None = None
        self._if_match: str | None = None

    def of(self, caller: Caller, if_match: str | None = None) -> JobService:
        """The same for one request: it sees the caller's tenant, and changes a job only if `if_match` names its tag."""
        bound = copy(self)
        bound._bound, bound._if_match = caller, if_match
        return bound

    @property
    def _caller(self) -> Caller:
        assert self._bound is not None, "nobody asks: use of(caller)"
        return self._bound

    @property
    def _tenant(self) -> str:
        return self._caller.tenant

    def _locked(self, session: Session, job_id: str) -> JobRow:
        """The job, locked, as the caller believes it to be. Raises JobMissing, Changed."""
        job = JobRepository(session, self._tenant).locked(job_id)
        if self._if_match is not None:
            tag = Shown.of(self._documents(session, [job])[0], job.version).tag
            if not matches(self._if_match, tag):
                raise Changed(f"job {job.id} has the tag {tag}, If-Match asks for {self._if_match[:200]}",
                              remedy="look at the job again, and decide again")  # fmt: skip
        return job

    def _audit(self, session: Session, action: str, job: JobRow) -> None:
        AuditRepository(session).note(self._caller, self._clock(), f"job.{action}", job.id, name=job.name)

    def create(self, document: Any, body: bytes, key: str | None) -> tuple[Job, bool]:
        """Take a job; True with it when it is an earlier one, replayed for its Idempotency-Key.

        Raises InvalidRequest, NameInUse, whatever preflight finds wrong, and the idempotency errors.
        """
        if key is None:
            return self._create(document, None), False
        if not isinstance(owned := self._idempotency.begin(self._tenant, key, body), Owned):
            return Job.model_validate(owned), True
        try:
            return self._create(document, owned), False
        except BaseException:
            self._idempotency.forget(owned)
            raise

    def _create(self, document: Any, owned: Owned | None) -> Job:
        spec = parse_job(document)
        with self._db.read() as session:
            self._check_name(session, spec.name, None)
        # It reads files: never inside a writing transaction.
        looked = self._preflight(spec, roots_of(self._tenant, self._roots))
        try:
            return self._store(spec, looked, owned)
        except IntegrityError:  # another request took the name between our look and our commit
            with self._db.read() as session:
                self._check_name(session, spec.name, None)
            raise

    def _store(self, spec: JobSpec, looked: Preflighted, owned: Owned | None) -> Job:
        now = self._clock()
        with self._db.write() as session:
            self._check_name(session, spec.name, None)
            self._check_quota(session)
            job = JobRow(
                id=f"job_{secrets.token_hex(12)}", tenant=self._tenant, name=spec.name, rank=-spec.priority, status=JobStatus.QUEUED,
                spec=spec.model_dump(mode="json"), sources=dict(looked.sources), warnings=list(looked.warnings), created_at=now,
                version=1, event_seq=0, log_seq=0,
            )  # fmt: skip
            JobRepository(session, self._tenant).add(job, self._planner.new_stages(job, spec))
            self._audit(session, "create", job)
            history = History(session)
            history.event(job, now, "job.created", f"job for drafter {job.name} taken", name=job.name, **_trace())
            logs.note(job=job.id, tenant=job.tenant)
            for warning in looked.warnings:
                history.event(job, now, "job.warning", warning, "warning")
            self._planner.advance(session, job)
            session.flush()
            shown = self._documents(session, [job])[0]
            if owned is not None:
                self._idempotency.remember(session, owned, shown.model_dump(mode="json"))
            return shown

    def plan(self, document: Any) -> JobPlan:
        """What a job would do; nothing is stored. Raises what `create` raises."""
        spec = parse_job(document)
        looked = self._preflight(spec, roots_of(self._tenant, self._roots))
        with self._db.write() as session:  # a writer: results whose objects are gone are dropped from the cache
            self._check_name(session, spec.name, None)
            forecast = self._planner.forecast(session, self._tenant, spec, looked.sources)
            fleet = WorkerRepository(session).fleet(self._clock() - WORKER_GONE_S)
        stages = [
            PlannedStage(
                name=f.name, queue=queue_of(STAGES[f.name], spec), reads=list(reads_of(STAGES[f.name], spec)),
                units=f.units, reused_units=f.reused,
            )
            for f in forecast
        ]  # fmt: skip
        missing = unserved(((s.name, s.queue) for s in stages if s.units is None or s.units != s.reused_units), fleet)
        return JobPlan(
            name=spec.name, stages=stages, sources=dict(looked.sources), train_peak_bytes=looked.train_peak_bytes,
            warnings=[*looked.warnings, *missing], spec=spec,
        )  # fmt: skip

    def get(self, job_id: str) -> Shown:
        """A job's document and its tag. Raises JobMissing."""
        with self._db.read() as session:
            jobs = JobRepository(session, self._tenant)
            version = jobs.version_of(job_id)
            if (shown := self._ended.get(self._tenant, job_id, version)) is not None:
                return shown
            job = jobs.get(job_id)
            shown = Shown.of(self._documents(session, [job])[0], job.version)
        self._ended.keep(self._tenant, job_id, job.version, shown)
        return shown

    def list(self, wanted: Wanted, after: str | None, limit: int) -> JobList:
        """A page of jobs, newest first."""
        with self._db.read() as session:
            jobs = JobRepository(session, self._tenant).page(wanted, after, limit + 1)
            data = self._documents(session, jobs[:limit], measured=False)
        return JobList(
            data=data, has_more=len(jobs) > limit,
            first_id=data[0].id if data else None, last_id=data[-1].id if data else None,
        )  # fmt: skip

    def cancel(self, job_id: str) -> Job:
        """Stop a living job: what waits is cancelled at once, what runs is told at its next sign of life.

        Raises JobMissing, IllegalMove, Changed.
        """
        now = self._clock()
        with self._db.write() as session:
            job = self._locked(session, job_id)
            if JobStatus(job.status).terminal:
                raise IllegalMove(f"job {job.id} is {job.status}", remedy="only living jobs can be cancelled")
            if job.status != JobStatus.CANCELLING:
                self._cancel(session, job, now)
                self._audit(session, "cancel", job)
            session.flush()
            return self._documents(session, [job])[0]

    def _cancel(self, session: Session, job: JobRow, now: float) -> None:
        units, job.reason = UnitRepository(session, job.tenant), None
        for unit in units.of_job(job.id, [UnitState.QUEUED, UnitState.PAUSED]):
            drop(unit, UnitState.CANCELLED, now)
        if running := units.of_job(job.id, [UnitState.RUNNING]):
            move(job, JobStatus.CANCELLING)
            tell(session, "stops")
            said = f"cancel asked for; {len(running)} running unit{'s' * (len(running) > 1)} to stop"
            History(session).event(job, now, "job.cancelling", said, "warning")
        else:
            finish_cancel(session, job, now)

    def pause(self, job_id: str) -> Job:
        """Let a living job wait: what runs is asked to save and give its place back. Raises JobMissing, IllegalMove."""
        now = self._clock()
        with self._db.write() as session:
            job = self._locked(session, job_id)
            pause(session, job, by_person(), now)
            self._audit(session, "pause", job)
            session.flush()
            return self._documents(session, [job])[0]

    def resume(self, job_id: str) -> Job:
        """Let a paused job go on. Raises JobMissing, IllegalMove."""
        now = self._clock()
        with self._db.write() as session:
            job = self._locked(session, job_id)
            resume(session, job, now)
            self._audit(session, "resume", job)
            self._planner.advance(session, job)
            session.flush()
            return self._documents(session, [job])[0]

    def retry(self, job_id: str) -> Job:
        """Take a failed or cancelled job up again where it stopped; committed units are kept if their objects are there.

        Raises JobMissing, IllegalMove, NameInUse, QuotaReached, Changed.
        """
        with self._db.read() as session:
            made = outputs_of(session, JobRepository(session, self._tenant).get(job_id))
        gone = {unit.id for unit in made if lost(unit, self._vetting)}  # it reads the store: never inside a transaction
        now = self._clock()
        with self._db.write() as session:
            job = self._locked(session, job_id)
            if job.status not in (JobStatus.FAILED, JobStatus.CANCELLED):
                raise IllegalMove(
                    f"job {job.id} is {job.status}", remedy="only failed and cancelled jobs can be retried"
                )
            self._check_name(session, job.name, job.id)
            self._check_quota(session)
            self._audit(session, "retry", job)
            move(job, JobStatus.QUEUED)
            job.reason = job.finished_at = None
            History(session).event(job, now, "job.retried", "taken up again from where it stopped")
            forget_lost(session, job, gone, now)
            revive(session, job)
            self._planner.advance(session, job)
            session.flush()
            return self._documents(session, [job])[0]

    def delete(self, job_id: str) -> None:
        """Remove a job that has ended, and its drafter. Raises JobMissing, IllegalMove, Changed."""
        with self._db.write() as session:
            job = self._locked(session, job_id)
            if not JobStatus(job.status).terminal:
                raise IllegalMove(
                    f"job {job.id} is {job.status}", remedy="cancel it and wait for its end, then delete it"
                )
            self._audit(session, "delete", job)
            DrafterRepository(session, self._tenant).forget(job.id)
            JobRepository(session, self._tenant).delete(job)

    def _check_name(self, session: Session, name: str, own_id: str | None) -> None:
        holder = JobRepository(session, self._tenant).living_named(name)
        if holder is not None and holder.id != own_id:
            raise NameInUse(
                f"job {holder.id} ({holder.status}) is making a drafter called {name!r}",
                remedy="choose another name, or cancel that job",
                pointer="/name",
            )
        if (drafter := DrafterRepository(session, self._tenant).named(name)) is not None:
            raise NameInUse(
                f"job {drafter.job_id} made a drafter called {name!r}", remedy="choose another name", pointer="/name"
            )

    def _check_quota(self, session: Session) -> None:
        """Raise QuotaReached if the tenant has as many living jobs as it may."""
        limit = TenantRepository(session).get(self._tenant).max_living_jobs
        if limit is None:
            return
        TenantRepository(session).locked(self._tenant)  # so that two posts do not both find the last place
        have = UsageRepository(session, self._tenant).jobs(LIVING)
        if have >= limit:
            raise QuotaReached(
                f"the tenant {self._tenant} has {have} living jobs, its limit is {limit}",
                remedy="wait until one ends, cancel one, or have the operator raise max_living_jobs",
            )

    def _documents(self, session: Session, jobs: Sequence[JobRow], *, measured: bool = True) -> list[Job]:
        return documents(session, self._tenant, jobs, self._clock(), measured=measured)


def _trace() -> dict[str, Any]:
    """What joins the job's units to the trace of the request that posted it, if it is traced."""
    return {} if (parent := traces.current()) is None else {"traceparent": parent}
