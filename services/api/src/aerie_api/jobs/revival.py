"""How an ended job is taken up again: what it made is kept where it is still there, the rest waits for workers anew."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy.orm import Session

from aerie_api.db import tell
from aerie_api.jobs.history import History
from aerie_api.jobs.repository import JobRepository
from aerie_api.leases.endings import move
from aerie_api.leases.repository import CommitRepository, UnitRepository
from aerie_api.leases.vetting import Vetting
from aerie_api.tables import Job as JobRow
from aerie_api.tables import StageRow, Unit
from eagle3_core.jobs.states import JobStatus, UnitState
from eagle3_core.jobs.wire import ManifestRef


def outputs_of(session: Session, job: JobRow) -> list[Unit]:
    """The units of `job` that have made something."""
    return UnitRepository(session, job.tenant).of_job(job.id, [UnitState.SUCCEEDED])


def lost(unit: Unit, vetting: Vetting) -> bool:
    """Whether the objects of a committed unit are gone or damaged. It reads the store."""
    return unit.released_at is not None or not vetting.intact(ManifestRef.model_validate(unit.manifest))


def forget_lost(session: Session, job: JobRow, gone: Collection[str], now: float) -> None:
    """Run units again whose output is gone; what was built on them is planned again, and reused if it is the same."""
    units = UnitRepository(session, job.tenant).of_job(job.id, list(UnitState))
    found = [u for u in units if u.id in gone and u.state == UnitState.SUCCEEDED]
    if not found:
        return
    first = min(unit.position for unit in found)
    for unit in found:
        CommitRepository(session, job.tenant).forget(unit.key)
        unit.state, unit.reused_from = UnitState.CANCELLED, None
    UnitRepository(session, job.tenant).remove([u for u in units if u.position > first])
    for stage in JobRepository(session, job.tenant).stages(job.id):
        if stage.position >= first:
            _reset(stage, planned=stage.position == first)
    names = ", ".join(f"{u.stage} unit {u.index}" for u in found[:5])
    said = f"output missing or damaged, to be made again: {names}{', ...' if len(found) > 5 else ''}"
    History(session).event(job, now, "unit.output_lost", said, "warning", units=len(found))


def revive(session: Session, job: JobRow) -> None:
    """Let what failed or was cancelled of `job` be claimed again, with all its attempts before it."""
    units = UnitRepository(session, job.tenant)
    for unit in units.of_job(job.id, [UnitState.FAILED, UnitState.CANCELLED]):
        unit.state, unit.not_before, unit.finished_at, unit.rung_at = UnitState.QUEUED, 0.0, None, None
        unit.attempt = unit.failures = unit.losses = unit.preemptions = 0
    running = units.of_job(job.id, [UnitState.RUNNING])
    for stage in JobRepository(session, job.tenant).stages(job.id):
        if stage.state in (UnitState.FAILED, UnitState.CANCELLED):
            stage.state = UnitState.RUNNING if running else UnitState.QUEUED
            stage.state = stage.state if stage.planned_at is not None else UnitState.PENDING
            stage.reason = stage.finished_at = None
    if running:  # a sibling of the unit that failed is still at work
        move(job, JobStatus.RUNNING)
    tell(session, "work")


def _reset(stage: StageRow, *, planned: bool) -> None:
    """Let `stage` be done again; its units stay if it is still `planned`."""
    stage.state = UnitState.QUEUED if planned else UnitState.PENDING
    stage.planned_at = stage.planned_at if planned else None
    stage.result = stage.reason = stage.finished_at = None
