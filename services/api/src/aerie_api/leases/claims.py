"""What workers do with units: claim, report, commit, give up; and what becomes of units that nobody reports on.

The rule that makes every death harmless: only the holder of a unit's newest fence writes to it. A claim makes the
fence grow, so whoever held the unit before has lost it, whatever it still believes. All that follows from a write
(the next stage, the job's end) happens in the same transaction. Every transaction locks the unit's job before it looks
at the unit, so what it then reads is true until it commits, whoever else is at work.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from sqlalchemy.orm import Session

from aerie_api.db import Database
from aerie_api.jobs.history import History
from aerie_api.jobs.repository import JobMissing, JobRepository
from aerie_api.leases.endings import drop, move, settle_cancel, stage_row
from aerie_api.leases.planner import Planner, stage_name
from aerie_api.leases.repository import CommitRepository, UnitRepository, WorkerRepository, living, wanted
from aerie_api.leases.retries import Retries, Rules
from aerie_api.leases.turns import Turns
from aerie_api.leases.vetting import Vetting
from aerie_api.leases.watchdog import least_patience_s, note_move, stuck
from aerie_api.leases.worker_health import blames, judge
from aerie_api.metrics import BYTES, UNIT_SECONDS, once_committed
from aerie_api.tables import Attempt, CommitRow, Job, Unit
from aerie_api.tenants.repository import TenantRepository
from eagle3_core.errors import AerieError
from eagle3_core.jobs.refusals import LeaseLost, WorkerSetAside
from eagle3_core.jobs.states import Cause, JobStatus, UnitState
from eagle3_core.jobs.wire import (
    Assignment,
    AttemptStop,
    ClaimRequest,
    Commit,
    Failure,
    Heartbeat,
    HeartbeatAnswer,
    Output,
    Stops,
)
from eagle3_core.telemetry.logs import note

REAP_EVERY_S = 1.0
"""How often claims look for leases that are over, however many workers ask."""


class UnknownToken(AerieError):
    """The token belongs to no attempt at this unit."""

    code, status = "worker.unauthorised", 401


class Claims:
    """The lease machinery, over one database."""

    def __init__(
        self, db: Database, planner: Planner, vetting: Vetting, rules: Rules, clock: Callable[[], float],
        stuck_factor: float = 1.0,
    ) -> None:  # fmt: skip
        self._db = db
        self._planner = planner
        self._vetting = vetting
        self._rules = rules
        self._retries = Retries(rules)
        self._clock = clock
        self._stuck_factor = stuck_factor
        self._reaped_at = -math.inf

    # -- claiming

    def claim(self, request: ClaimRequest) -> Assignment | None:
        """The next unit for a worker, or None. What an earlier incarnation of the worker held is free at once.

        Raises WorkerSetAside.
        """
        refusal = self._free_earlier(request)
        if abs((now := self._clock()) - self._reaped_at) >= REAP_EVERY_S:
            self._reaped_at = now
            self.reap()
        if refusal is not None:
            with self._db.write() as session:
                WorkerRepository(session).seen(request, self._clock())
            raise WorkerSetAside(str(refusal.get("detail")), remedy=str(refusal.get("remedy")))
        while True:
            assignment, missed = self._claim(request)
            if not missed:
                return assignment

    def _claim(self, request: ClaimRequest) -> tuple[Assignment | None, bool]:
        """One try: an assignment, or None and whether others were faster, so that trying again can help."""
        now = self._clock()
        with self._db.write() as session:
            units, assignment, missed = UnitRepository(session), None, False
            queues = request.only or request.queues
            if (place := Turns(session).next_place(queues, now)) is not None:
                job = JobRepository(session, place[0]).locked(place[1])
                unit = units.next_of(job.id, queues, now) if self._may_start(session, job, now) else None
                token = secrets.token_urlsafe(32)
                missed = unit is None
                if unit is not None and units.take(unit, request, token, now, self._rules.lease_s):
                    self._begin(session, job, unit, now)
                    note(job=job.id, tenant=job.tenant, stage=unit.stage, unit=unit.index, attempt=unit.attempt,
                         worker=request.worker_id)  # fmt: skip
                    assignment = self._planner.assignment(session, job, unit, token, self._rules.lease_s)
            if not missed:
                WorkerRepository(session).seen(request, now)
            return assignment, missed

    def _may_start(self, session: Session, job: Job, now: float) -> bool:
        """Whether a unit of `job` may start, now that nobody else can start another job of the tenant."""
        if job.status != JobStatus.QUEUED:
            return True
        tenant = TenantRepository(session).get(job.tenant)
        if tenant.max_running_jobs is None:
            return True
        tenant = TenantRepository(session).locked(job.tenant)
        return Turns(session).quota(tenant, now).no_further_job is None

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
            self._hold(session, unit, self._attempt(session, unit, token), now)
            note_move(unit, heartbeat, now)
            if heartbeat.progress is not None:
                unit.progress = heartbeat.progress.model_dump(mode="json")
                job.version += 1
            self._record(session, job, unit, heartbeat, now)
            return self._answer(job)

    def commit(self, unit_id: str, token: str, commit: Commit) -> None:
        """End a unit with its result. The same commit again changes nothing.

        Raises UnknownToken, LeaseLost, CommitRefused (what it names is not there, or is another unit's).
        """
        self._known(unit_id, token)
        sizes = self._vetting.objects(commit)
        now = self._clock()
        with self._db.write() as session:
            unit, job = self._locked(session, unit_id)
            attempt = self._attempt(session, unit, token)
            if self._already(unit, attempt, commit):
                return
            self._hold(session, unit, attempt, now)
            self._vetting.keys(commit, job, unit)
            for output in (commit.output, *commit.also):
                CommitRepository(session, unit.tenant).add(_commit_row(output, job, now, sizes[output.manifest.key]))
            self._record(session, job, unit, commit, now)
            UnitRepository(session).end_attempt(unit, now, "committed", None, blames_worker=False)
            drop(unit, UnitState.SUCCEEDED, now)
            unit.manifest, unit.result = commit.output.manifest.model_dump(), commit.output.result
            unit.released_at = None
            unit.seconds = seconds = max(0.0, commit.seconds)
            once_committed(session, lambda: _count_commit(commit, sizes, seconds))
            job.version += 1
            self._planner.advance(session, job)
            settle_cancel(session, job, now)

    def fail(self, unit_id: str, token: str, failure: Failure) -> None:
        """End an attempt without a result. Raises UnknownToken, LeaseLost."""
        now = self._clock()
        with self._db.write() as session:
            unit, job = self._locked(session, unit_id)
            self._hold(session, unit, self._attempt(session, unit, token), now)
            self._record(session, job, unit, failure, now)
            problem = self._vetting.problem(failure)
            worker, blamed = unit.worker_id, blames(job, failure)
            self._retries.ended(
                session, job, unit, now, failure.cause, problem, retryable=failure.retryable, blames_worker=blamed
            )
            if blamed and worker is not None:
                session.flush()
                judge(session, job, worker, now)

    def stops(self, question: Stops) -> dict[str, AttemptStop]:
        """What is to stop of what a worker holds, but for the attempts that it knows of."""
        with self._db.read() as session:
            held = UnitRepository(session).held_by(question.worker_id, question.incarnation)
            return {
                unit_id: AttemptStop(fence=fence, **self._answer(job).model_dump())
                for unit_id, fence, job in held
                if not living(job) and question.known.get(unit_id) != fence
            }

    def _answer(self, job: Job) -> HeartbeatAnswer:
        return HeartbeatAnswer(
            cancel=not wanted(job), give_back=wanted(job) and not living(job), lease_s=self._rules.lease_s
        )

    def _known(self, unit_id: str, token: str) -> None:
        """Raise UnknownToken or LeaseLost unless `token` was once given for the unit: who has none makes us read no object."""
        with self._db.read() as session:
            units = UnitRepository(session)
            if units.attempt_of(unit_id, token) is None:
                raise unknown(unit_id) if units.place_of(unit_id) is not None else gone(unit_id)

    def _locked(self, session: Session, unit_id: str) -> tuple[Unit, Job]:
        """The unit and its job, which is locked. Raises LeaseLost when there is no such unit any more."""
        units = UnitRepository(session)
        with suppress(JobMissing):
            if (place := units.place_of(unit_id)) is not None:
                job = JobRepository(session, place[0]).locked(place[1])
                if (unit := units.get(unit_id)) is not None:
                    note(job=job.id, tenant=job.tenant, stage=unit.stage, unit=unit.index, attempt=unit.attempt)
                    return unit, job
        raise gone(unit_id)

    @staticmethod
    def _attempt(session: Session, unit: Unit, token: str) -> Attempt:
        """The attempt that `token` was given for. Raises UnknownToken."""
        if (attempt := UnitRepository(session).attempt_of(unit.id, token)) is None:
            raise unknown(unit.id)
        return attempt

    def _hold(self, session: Session, unit: Unit, attempt: Attempt, now: float) -> None:
        """Extend the lease of `attempt`. Raises LeaseLost."""
        if not UnitRepository(session).hold(unit, attempt.fence, now, self._rules.lease_s):
            raise over(unit, attempt)
        if unit.worker_id is not None:
            WorkerRepository(session).still_there(unit.worker_id, now)

    @staticmethod
    def _already(unit: Unit, attempt: Attempt, commit: Commit) -> bool:
        committed = (attempt.fence, attempt.cause, unit.state) == (unit.fence, "committed", UnitState.SUCCEEDED)
        return committed and unit.manifest == commit.output.manifest.model_dump()

    def _record(self, session: Session, job: Job, unit: Unit, report: Heartbeat | Commit | Failure, now: float) -> None:
        history = History(session)
        history.log(job, unit, report.logs, now)
        if not isinstance(report, Failure):
            history.measure(job, unit, report.metrics, now)

    # -- silence and standstill

    def reap(self) -> None:
        """Take back every unit whose lease is over or that stands still. Mostly none is: then no writer has to wait."""
        now, factor = self._clock(), self._stuck_factor
        with self._db.read() as session:
            units = UnitRepository(session)
            expired = units.expired(now)
            still = units.not_moved_since(now - least_patience_s(factor)) if factor else []
        for unit in expired:
            silent = now - (unit.last_heartbeat or now)
            self._take_back(unit, f"worker {unit.worker_id} was silent for {silent:.0f} s", silent=True)
        for unit in still:
            self._end_stuck(unit)

    def _end_stuck(self, seen: Unit) -> None:
        now = self._clock()
        with suppress(LeaseLost), self._db.write() as session:
            unit, job = self._locked(session, seen.id)
            if (unit.state, unit.fence) != (UnitState.RUNNING, seen.fence):
                return
            if (why := stuck(unit, stage_name(unit.stage), self._stuck_factor, now)) is not None:
                self._retries.ended(session, job, unit, now, Cause.FAILED, why.problem())

    def _free_earlier(self, request: ClaimRequest) -> dict[str, Any] | None:
        """Take back what an earlier start of the worker held; the problem for which it was set aside, if it was."""
        with self._db.read() as session:
            refusal = WorkerRepository(session).refusal(request.worker_id)
            held = UnitRepository(session).of_earlier_incarnation(request.worker_id, request.incarnation)
        for unit in held:
            self._take_back(unit, f"worker {request.worker_id} was started again", silent=False)
        return refusal

    def _take_back(self, seen: Unit, why: str, *, silent: bool) -> None:
        """End the attempt that held `seen`, which was read without a lock: it may have ended since, or been heard of."""
        with suppress(LeaseLost), self._db.write() as session:
            unit, job = self._locked(session, seen.id)
            if (unit.state, unit.fence) != (seen.state, seen.fence):
                return
            if not silent or unit.lease_expires_at == seen.lease_expires_at:
                self._retries.lost(session, job, unit, self._clock(), why, pause=silent)

    def extend_all(self) -> None:
        """Give every holder a full lease: while the API was away nobody could report."""
        now = self._clock()
        with self._db.write() as session:
            UnitRepository(session).extend_all(now, now + self._rules.lease_s)


def gone(unit_id: str) -> LeaseLost:
    """What is said of a unit that is no more."""
    return LeaseLost(f"there is no unit {unit_id} any more", remedy="stop the attempt and claim again")


def over(unit: Unit, attempt: Attempt) -> LeaseLost:
    """What is said to an attempt that holds `unit` no longer."""
    return LeaseLost(
        f"attempt {attempt.attempt} at {unit.stage} unit {unit.index} (fence {attempt.fence}) is over: "
        f"the unit is {unit.state} at fence {unit.fence}",
        remedy="stop the attempt and throw its output away; another one has the unit",
    )


def unknown(unit_id: str) -> UnknownToken:
    """What is said to a token that never held the unit."""
    return UnknownToken(f"the token holds no attempt at {unit_id}", remedy="claim a unit first")


def _count_commit(commit: Commit, sizes: dict[str, int], seconds: float) -> None:
    UNIT_SECONDS.labels(commit.output.stage).observe(seconds)
    for output in (commit.output, *commit.also):
        BYTES.labels(output.stage).inc(sizes[output.manifest.key])


def _commit_row(output: Output, job: Job, now: float, size: int) -> CommitRow:
    return CommitRow(
        tenant=job.tenant, key=output.key, stage=output.stage, manifest=output.manifest.model_dump(),
        result=output.result, job_id=job.id, created_at=now, bytes=size, sources=dict(job.sources),
    )  # fmt: skip
