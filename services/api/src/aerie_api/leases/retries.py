"""What becomes of a unit whose attempt ended without a result: tried again, given up, put by, or stopped with its job.

Causes are counted apart. An error is the unit's own (3 attempts by default). A worker that vanished says little about
the unit (20 by default: machines come and go, yet a unit that kills whomever it meets must end). A unit that gave its
place back has done nothing wrong and is tried again for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from aerie_api.db import tell
from aerie_api.jobs.history import History, Level
from aerie_api.leases.endings import WorkerLost, drop, fail_job, requeue, settle_cancel, stage_row
from aerie_api.leases.pausing import PAUSING, pause
from aerie_api.leases.repository import UnitRepository, wanted
from aerie_api.metrics import LOSSES, once_committed
from aerie_api.tables import Job, Unit
from eagle3_core.jobs.states import Cause, UnitState

Problem = dict[str, Any]


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


class Retries:
    """Ends attempts, by `rules`. The caller has locked the job."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def lost(self, session: Session, job: Job, unit: Unit, now: float, why: str, *, pause: bool) -> None:
        """The worker of `unit` vanished."""
        once_committed(session, LOSSES.labels(unit.stage).inc)
        problem = WorkerLost(
            f"{unit.stage} unit {unit.index}: {why}",
            remedy="see the worker's own log and the machine's for why it died (often: out of memory), then retry the job",
        ).problem()
        self.ended(session, job, unit, now, Cause.WORKER_LOST, problem, pause=pause)

    def ended(
        self, session: Session, job: Job, unit: Unit, now: float, cause: Cause, problem: Problem,
        *, retryable: bool = True, pause: bool = True, blames_worker: bool = False,
    ) -> None:  # fmt: skip
        """The newest attempt at `unit` ended by `cause`. `pause`: wait a while before the next."""
        UnitRepository(session).end_attempt(unit, now, cause, problem, blames_worker)
        if not wanted(job):
            drop(unit, UnitState.CANCELLED, now)
            job.version += 1
            settle_cancel(session, job, now)
        elif problem.get("code") in PAUSING:
            self._put_by(session, job, unit, now, problem)
        elif cause in (Cause.PREEMPTED, Cause.CANCELLED):
            unit.preemptions += 1
            requeue(session, job, unit, now)
            _tell(session, job, unit, now, "unit.preempted", "gave its place back and goes on elsewhere", "info")
        elif cause == Cause.WORKER_LOST and retryable:
            unit.losses += 1
            wait_s = self._rules.pause(unit.losses) if pause else 0.0
            self._again(
                session, job, unit, now, wait_s, problem, ("unit.lost", "loss", unit.losses, self._rules.max_losses)
            )
        else:
            unit.failures += 1
            allowed = self._rules.max_attempts if retryable else 0
            self._again(session, job, unit, now, self._rules.pause(unit.failures), problem,
                        ("unit.failed", "failure", unit.failures, allowed))  # fmt: skip

    def _again(
        self, session: Session, job: Job, unit: Unit, now: float, wait_s: float, problem: Problem,
        count: tuple[str, str, int, int],
    ) -> None:  # fmt: skip
        kind, word, times, allowed = count
        if times >= allowed:
            drop(unit, UnitState.FAILED, now)
            return fail_job(session, job, stage_row(session, job, unit.stage), problem, now)
        unit.progress = None  # it may be lost, and time that it would take again is not to be left out of an estimate
        requeue(session, job, unit, now + wait_s)
        said = f"{problem.get('detail')}; {word} {times} of at most {allowed}, queued again"
        return _tell(session, job, unit, now, kind, said, "warning", problem=problem)

    def _put_by(self, session: Session, job: Job, unit: Unit, now: float, problem: Problem) -> None:
        """What stopped the unit would stop every other one too, and is not the job's fault: the job waits."""
        unit.preemptions += 1
        pause(session, job, problem, now)
        requeue(session, job, unit, now)
        tell(session, "work")


def _tell(session: Session, job: Job, unit: Unit, now: float, kind: str, said: str, level: Level, **data: Any) -> None:
    message = f"{unit.stage} unit {unit.index}, attempt {unit.attempt}: {said}"
    History(session).event(
        job, now, kind, message, level, stage=unit.stage, unit=unit.index, attempt=unit.attempt, **data
    )
