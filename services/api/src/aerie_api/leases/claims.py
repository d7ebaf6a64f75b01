"""What workers do with units: claim, report, commit, give up; and what becomes of units that nobody reports on.

The rule that makes every death harmless: only the holder of a unit's newest fence writes to it. A claim makes the
fence grow, so whoever held the unit before has lost it, whatever it still believes. All that follows from a write
(the next stage, the job's end) happens in the same transaction. Every transaction locks the unit's job before it looks
at the unit, so what it then reads is true until it commits, whoever else is at work.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from aerie_api.db import Database
from aerie_api.jobs.history import History
from aerie_api.jobs.repository import JobMissing, JobRepository
from aerie_api.leases.endings import WorkerLost, drop, fail_job, move, requeue, settle_cancel, stage_row
from aerie_api.leases.planner import Planner
from aerie_api.leases.repository import CommitRepository, UnitRepository, WorkerRepository, living
from aerie_api.leases.vetting import Vetting
from aerie_api.tables import CommitRow, Job, Unit
from eagle3_core.errors import AerieError
from eagle3_core.jobs.states import Cause, JobStatus, UnitState
from eagle3_core.jobs.wire import (
    Assignment,
    ClaimRequest,
    Commit,
    Failure,
    Heartbeat,
    HeartbeatAnswer,
    Output,
)


class LeaseLost(AerieError):
    """The attempt no longer holds its unit."""

    code, status = "lease.lost", 409


class UnknownToken(AerieError):
    """The token belongs to no attempt at this unit."""

    code, status = "worker.unauthorised", 401


@dataclass(frozen=True)
class Rules:
    """How long leases last and how often a unit is tried."""

    lease_s: float
    max_attempts: int
    max_losses: int
    retry_base_s: float
    retry_max_s: float

    def pause(self, times: int) -> float:
        """Seconds to wait after the `times`-th bad end."""
        return min(self.retry_base_s * 2 ** min(times - 1, 30), self.retry_max_s)


class Claims:
    """The lease machinery, over one database."""

    def __init__(
        self, db: Database, planner: Planner, vetting: Vetting, rules: Rules, clock: Callable[[], float]
    ) -> None:
        self._db = db
        self._planner = planner
        self._vetting = vetting
        self._rules = rules
        self._clock = clock

    # -- claiming

    def claim(self, request: ClaimRequest) -> Assignment | None:
        """The next unit for a worker, or None. What an earlier incarnation of the worker held is free at once."""
        self._free_earlier(request)
        self.reap()
        while True:
            assignment, missed = self._claim(request)
            if not missed:
                return assignment

    def _claim(self, request: ClaimRequest) -> tuple[Assignment | None, bool]:
        """One try: an assignment, or None and whether others were faster, so that trying again can help."""
        now = self._clock()
        with self._db.write() as session:
            units, assignment, missed = UnitRepository(session), None, False
            if (place := units.next_place(request.queues, now)) is not None:
                job = JobRepository(session, place[0]).locked(place[1])
                unit = units.next_of(job.id, request.queues, now)
                token = secrets.token_urlsafe(32)
                missed = unit is None
                if unit is not None and units.take(unit, request, token, now, self._rules.lease_s):
                    self._begin(session, job, unit, now)
                    assignment = self._planner.assignment(session, job, unit, token, self._rules.lease_s)
            if not missed:
                WorkerRepository(session).seen(request, now)
            return assignment, missed

    def _begin(self, session: Session, job: Job, unit: Unit, now: float) -> None:
        stage = stage_row(session, job, unit.stage)
        move(job, JobStatus.RUNNING)
        job.started_at = job.started_at or now
        if stage.state != UnitState.RUNNING:
            stage.state, stage.started_at = UnitState.RUNNING, stage.started_at or now
            History(session).event(job, now, "stage.started", f"{stage.name}: started", stage=stage.name)

    def next_due(self, queues: Collection[str]) -> float | None:
        """Seconds until a unit that waits after a bad end may be claimed."""
        now = self._clock()
        with self._db.read() as session:
            due = UnitRepository(session).next_due(queues, now)
        return None if due is None else due - now

    # -- reports of the holder

    def heartbeat(self, unit_id: str, token: str, heartbeat: Heartbeat) -> HeartbeatAnswer:
        """Keep a unit. Raises UnknownToken, LeaseLost."""
        now = self._clock()
        with self._db.write() as session:
            unit, job = self._locked(session, unit_id)
            self._hold(session, unit, token, now)
            if heartbeat.progress is not None:
                unit.progress = heartbeat.progress.model_dump(mode="json")
                job.version += 1
            self._record(session, job, unit, heartbeat, now)
            return HeartbeatAnswer(cancel=not living(job), lease_s=self._rules.lease_s)

    def commit(self, unit_id: str, token: str, commit: Commit) -> None:
        """End a unit with its result. The same commit again changes nothing.

        Raises UnknownToken, LeaseLost, CommitRefused (what it names is not there, or is another unit's).
        """
        self._vetting.objects(commit)
        now = self._clock()
        with self._db.write() as session:
            unit, job = self._locked(session, unit_id)
            if self._already(session, unit, token, commit):
                return
            self._hold(session, unit, token, now)
            self._vetting.keys(commit, job, unit)
            for output in (commit.output, *commit.also):
                CommitRepository(session, unit.tenant).add(_commit_row(output, job, now))
            self._record(session, job, unit, commit, now)
            UnitRepository(session).end_attempt(unit, now, "committed", None)
            drop(unit, UnitState.SUCCEEDED, now)
            unit.manifest, unit.result = commit.output.manifest.model_dump(), commit.output.result
            unit.seconds = max(0.0, commit.seconds)
            job.version += 1
            self._planner.advance(session, job)
            settle_cancel(session, job, now)

    def fail(self, unit_id: str, token: str, failure: Failure) -> None:
        """End an attempt without a result. Raises UnknownToken, LeaseLost."""
        now = self._clock()
        with self._db.write() as session:
            unit, job = self._locked(session, unit_id)
            self._hold(session, unit, token, now)
            self._record(session, job, unit, failure, now)
            problem = self._vetting.problem(failure)
            UnitRepository(session).end_attempt(unit, now, failure.cause, problem)
            if not living(job):
                self._stop(session, job, unit, now)
            elif failure.cause in (Cause.PREEMPTED, Cause.CANCELLED):
                unit.preemptions += 1
                requeue(session, unit, now)
                self._tell(
                    session, job, unit, now, "unit.preempted", "gave its place back and goes on elsewhere", "info"
                )
            elif failure.cause == Cause.WORKER_LOST and failure.retryable:
                self._try_again_after_loss(session, job, unit, now, problem, pause=True)
            else:
                self._try_again(session, job, unit, now, problem, failure.retryable)

    def _locked(self, session: Session, unit_id: str) -> tuple[Unit, Job]:
        """The unit and its job, which is locked. Raises LeaseLost when there is no such unit any more."""
        units = UnitRepository(session)
        with suppress(JobMissing):
            if (place := units.place_of(unit_id)) is not None:
                job = JobRepository(session, place[0]).locked(place[1])
                if (unit := units.get(unit_id)) is not None:
                    return unit, job
        raise LeaseLost(f"there is no unit {unit_id} any more", remedy="stop the attempt and claim again")

    def _hold(self, session: Session, unit: Unit, token: str, now: float) -> None:
        """Extend the lease of whoever `token` belongs to."""
        units = UnitRepository(session)
        attempt = units.attempt_of(unit.id, token)
        if attempt is None:
            raise UnknownToken(f"the token holds no attempt at {unit.id}", remedy="claim a unit first")
        if not units.hold(unit, attempt.fence, now, self._rules.lease_s):
            raise LeaseLost(
                f"attempt {attempt.attempt} at {unit.stage} unit {unit.index} (fence {attempt.fence}) is over: "
                f"the unit is {unit.state} at fence {unit.fence}",
                remedy="stop the attempt and throw its output away; another one has the unit",
            )
        if unit.worker_id is not None:
            WorkerRepository(session).still_there(unit.worker_id, now)

    def _already(self, session: Session, unit: Unit, token: str, commit: Commit) -> bool:
        attempt = UnitRepository(session).attempt_of(unit.id, token)
        return (
            attempt is not None
            and (attempt.fence, attempt.cause, unit.state) == (unit.fence, "committed", UnitState.SUCCEEDED)
            and unit.manifest == commit.output.manifest.model_dump()
        )

    def _record(self, session: Session, job: Job, unit: Unit, report: Heartbeat | Commit | Failure, now: float) -> None:
        history = History(session)
        history.log(job, unit, report.logs, now)
        if not isinstance(report, Failure):
            history.measure(job, unit, report.metrics, now)

    # -- bad ends

    def reap(self) -> None:
        """Take back every unit whose lease is over. Mostly none is: then nobody is kept from writing."""
        now = self._clock()
        with self._db.read() as session:
            expired = UnitRepository(session).expired(now)
        for unit in expired:
            silent = now - (unit.last_heartbeat or now)
            self._take_back(unit, f"worker {unit.worker_id} was silent for {silent:.0f} s", silent=True)

    def _free_earlier(self, request: ClaimRequest) -> None:
        with self._db.read() as session:
            held = UnitRepository(session).of_earlier_incarnation(request.worker_id, request.incarnation)
        for unit in held:
            self._take_back(unit, f"worker {request.worker_id} was started again", silent=False)

    def _take_back(self, seen: Unit, why: str, *, silent: bool) -> None:
        """End the attempt that held `seen`, which was read without a lock: it may have ended since, or been heard of."""
        with suppress(LeaseLost), self._db.write() as session:
            unit, job = self._locked(session, seen.id)
            if (unit.state, unit.fence) != (seen.state, seen.fence):
                return
            if not silent or unit.lease_expires_at == seen.lease_expires_at:
                self._lose(session, job, unit, self._clock(), why, pause=silent)

    def extend_all(self) -> None:
        """Give every holder a full lease: while the API was away nobody could report."""
        with self._db.write() as session:
            UnitRepository(session).extend_all(self._clock() + self._rules.lease_s)

    def _lose(self, session: Session, job: Job, unit: Unit, now: float, why: str, *, pause: bool) -> None:
        problem = WorkerLost(
            f"{unit.stage} unit {unit.index}: {why}",
            remedy="see the worker's own log and the machine's for why it died (often: out of memory), then retry the job",
        ).problem()
        UnitRepository(session).end_attempt(unit, now, Cause.WORKER_LOST, problem)
        if not living(job):
            self._stop(session, job, unit, now)
        else:
            self._try_again_after_loss(session, job, unit, now, problem, pause=pause)

    def _try_again_after_loss(
        self, session: Session, job: Job, unit: Unit, now: float, problem: dict[str, Any], *, pause: bool
    ) -> None:
        unit.losses += 1
        if unit.losses >= self._rules.max_losses:
            return self._give_up(session, job, unit, now, problem)
        requeue(session, unit, now + (self._rules.pause(unit.losses) if pause else 0.0))
        said = f"{problem.get('detail')}; loss {unit.losses} of at most {self._rules.max_losses}, queued again"
        self._tell(session, job, unit, now, "unit.lost", said, "warning", problem=problem)

    def _try_again(
        self, session: Session, job: Job, unit: Unit, now: float, problem: dict[str, Any], retryable: bool
    ) -> None:
        unit.failures += 1
        if not retryable or unit.failures >= self._rules.max_attempts:
            return self._give_up(session, job, unit, now, problem)
        requeue(session, unit, now + self._rules.pause(unit.failures))
        said = f"{problem.get('detail')}; failure {unit.failures} of at most {self._rules.max_attempts}, queued again"
        self._tell(session, job, unit, now, "unit.failed", said, "warning", problem=problem)

    def _give_up(self, session: Session, job: Job, unit: Unit, now: float, problem: dict[str, Any]) -> None:
        drop(unit, UnitState.FAILED, now)
        fail_job(session, job, stage_row(session, job, unit.stage), problem, now)

    def _stop(self, session: Session, job: Job, unit: Unit, now: float) -> None:
        drop(unit, UnitState.CANCELLED, now)
        job.version += 1
        settle_cancel(session, job, now)

    def _tell(
        self, session: Session, job: Job, unit: Unit, now: float, kind: str, said: str, level: Any, **data: Any
    ) -> None:
        message = f"{unit.stage} unit {unit.index}, attempt {unit.attempt}: {said}"
        History(session).event(
            job, now, kind, message, level, stage=unit.stage, unit=unit.index, attempt=unit.attempt, **data
        )


def _commit_row(output: Output, job: Job, now: float) -> CommitRow:
    return CommitRow(
        tenant=job.tenant, key=output.key, stage=output.stage, manifest=output.manifest.model_dump(),
        result=output.result, job_id=job.id, created_at=now,
    )  # fmt: skip
