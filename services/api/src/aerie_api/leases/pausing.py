"""A job that waits for a person, or for room in the store, and loses nothing meanwhile.

While a job is paused its units that wait may not be claimed, and those that run are told to save and give their place
back, which uses up no attempt; what finishes in time counts. Its reason says who paused it: what a person paused only a
person resumes, what a full store paused goes on by itself once there is room (`resume_all`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy.orm import Session

from aerie_api.db import tell
from aerie_api.jobs.history import History
from aerie_api.jobs.repository import JobRepository
from aerie_api.leases.endings import move
from aerie_api.leases.repository import UnitRepository
from aerie_api.tables import Job
from eagle3_core.errors import AerieError
from eagle3_core.jobs.states import IllegalMove, JobStatus, UnitState

STORE_FULL = "store.full"
PAUSING = frozenset({STORE_FULL})
"""Codes of failures that pause a job instead of failing its unit."""


class PausedByPerson(AerieError):
    """A person paused the job."""

    code, status = "job.paused", 409


def by_person() -> dict[str, Any]:
    """The reason of a job that a person pauses."""
    return PausedByPerson(
        "a person paused the job", remedy="resume it (`aerie resume`, or POST /jobs/JOB/resume) to let it go on"
    ).problem()


def pause(session: Session, job: Job, reason: dict[str, Any], now: float) -> None:
    """Let nothing more of `job` begin, and what runs give its place back. Raises IllegalMove for an ended job.

    A job that is paused stays so; only a person's reason replaces an earlier one.
    """
    if job.status == JobStatus.PAUSED:
        job.reason = reason if reason.get("code") == PausedByPerson.code else job.reason
        job.version += 1
        return
    move(job, JobStatus.PAUSED)
    job.reason = reason
    units = UnitRepository(session, job.tenant)
    for unit in units.of_job(job.id, [UnitState.QUEUED]):
        unit.state = UnitState.PAUSED
    running = units.of_job(job.id, [UnitState.RUNNING])
    if running:
        tell(session, "stops")
    said = f"paused: {reason.get('detail')}"
    said += f"; {len(running)} running unit{'s' * (len(running) > 1)} to save and stop" if running else ""
    History(session).event(job, now, "job.paused", said, "warning", problem=reason)


def resume(session: Session, job: Job, now: float) -> None:
    """Let `job` go on; the caller then lets the planner move it on. Raises IllegalMove unless it is paused."""
    if job.status != JobStatus.PAUSED:
        raise IllegalMove(f"job {job.id} is {job.status}", remedy="only paused jobs can be resumed")
    units = UnitRepository(session, job.tenant)
    for unit in units.of_job(job.id, [UnitState.PAUSED]):
        unit.state, unit.rung_at = UnitState.QUEUED, None
    move(job, JobStatus.RUNNING if units.of_job(job.id, [UnitState.RUNNING]) else JobStatus.QUEUED)
    job.reason = None
    History(session).event(job, now, "job.resumed", "goes on from where it was paused")
    tell(session, "work")


def resume_all(session: Session, code: str, now: float, fits: Callable[[Job], bool]) -> list[Job]:
    """Let every job go on that was paused for the reason `code` and `fits`, of whatever tenant; the caller moves them on."""
    paused = JobRepository.paused(session)
    jobs = [job for job in paused if (job.reason or {}).get("code") == code and fits(job)]
    for job in jobs:
        resume(session, job, now)
    return jobs
