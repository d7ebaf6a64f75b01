"""How jobs and units end short of success: failed, cancelled, tried again.

The only code that writes a failed or cancelled state. A unit that ends without a result is either tried again or takes
its job with it; nothing is left half-way.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from aerie_api.db import tell
from aerie_api.jobs.history import History
from aerie_api.jobs.repository import JobRepository
from aerie_api.leases.repository import UnitRepository
from aerie_api.tables import Job, StageRow, Unit
from eagle3_core.errors import AerieError
from eagle3_core.jobs.states import JobStatus, UnitState, check_move

Problem = dict[str, Any]


class WorkerLost(AerieError):
    """A unit's worker vanished, again and again."""

    code, status, retryable = "unit.worker_lost", 500, True


def move(job: Job, status: JobStatus) -> None:
    """Change a job's status. Raises IllegalMove."""
    if job.status != status:
        check_move(JobStatus(job.status), status)
        job.status = status
    job.version += 1


def stage_row(session: Session, job: Job, name: str) -> StageRow:
    """The stage `name` of `job`."""
    return next(row for row in JobRepository(session, job.tenant).stages(job.id) if row.name == name)


def requeue(session: Session, job: Job, unit: Unit, not_before: float) -> None:
    """Let any worker take `unit` from `not_before` on; while its job is paused, from its resumption on."""
    unit.state = UnitState.PAUSED if job.status == JobStatus.PAUSED else UnitState.QUEUED
    unit.not_before, unit.rung_at = not_before, None
    _let_go(unit)
    tell(session, "work")


def drop(unit: Unit, state: UnitState, now: float) -> None:
    """End `unit` without a result."""
    unit.state, unit.finished_at = state, now
    _let_go(unit)


def _let_go(unit: Unit) -> None:
    """Take `unit` from its worker. What it had reached stays said until another worker begins, if it was saved (`retries`)."""
    unit.worker_id = unit.incarnation = unit.lease_expires_at = None
    unit.moved_at = unit.longest_step_s = None


def fail_job(session: Session, job: Job, stage: StageRow, problem: Problem, now: float) -> None:
    """End `job` as failed at `stage`. Units that wait are cancelled; those that run are told at their next sign of life."""
    for unit in UnitRepository(session, job.tenant).of_job(job.id, [UnitState.QUEUED, UnitState.PAUSED]):
        drop(unit, UnitState.CANCELLED, now)
    tell(session, "stops")
    stage.state, stage.reason, stage.finished_at = UnitState.FAILED, problem, now
    move(job, JobStatus.FAILED)
    job.reason, job.finished_at = problem, now
    message = f"{stage.name} failed: {problem.get('detail') or problem.get('title') or problem.get('code')}"
    History(session).event(job, now, "job.failed", message, "error", stage=stage.name, problem=problem)


def settle_cancel(session: Session, job: Job, now: float) -> None:
    """End a job that is being cancelled once none of its units runs any more."""
    if job.status != JobStatus.CANCELLING or UnitRepository(session, job.tenant).of_job(job.id, [UnitState.RUNNING]):
        return
    finish_cancel(session, job, now)


def finish_cancel(session: Session, job: Job, now: float) -> None:
    """End `job` as cancelled."""
    for stage in JobRepository(session, job.tenant).stages(job.id):
        if stage.name == job.stage and stage.state != UnitState.SUCCEEDED:
            stage.state, stage.finished_at = UnitState.CANCELLED, now
    move(job, JobStatus.CANCELLED)
    job.finished_at = now
    History(session).event(job, now, "job.cancelled", "cancelled", "warning")
