"""Which workers get no more work because they fail unit after unit.

A node with a broken GPU fails every unit within seconds and is then free for the next one, so it would use up the attempts of
every job. Three failures in a row, of three different units, with no commit in between, set a worker aside. Because the cause
may be the job, one job's failures are not enough: they must come from at least two jobs, or another worker must have done
units of that very stage since.

Some failures say nothing about the worker and are not counted (`blames`): those that no other attempt could mend (bad data,
say), the death of a process that was killed from outside, and the failure of something that every worker would have met: the
object store, the API, a server that the job names (with a dead one a tenant could set healthy workers aside).

A person readmits the worker (`POST /workers/{id}/readmit`) after a look at its log.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from aerie_api.db import tell
from aerie_api.jobs.history import History
from aerie_api.tables import Attempt, Job, Unit, Worker
from eagle3_core.jobs.refusals import WorkerSetAside
from eagle3_core.jobs.states import Cause
from eagle3_core.jobs.wire import Failure

STREAK = 3
logger = logging.getLogger(__name__)


ELSEWHERE = ("endpoint.", "api.", "database.", "broker.")
"""Families of codes of what no worker is to blame for."""
ELSEWHERES = frozenset({"verifier.busy", "store.unavailable", "store.full", "object.missing", "rate.limited", "preflight.busy",
                        "idempotency.in_flight"})  # fmt: skip
"""Single such codes: what is turned away for being too much, and what the store lacks. A store that refuses a worker may well
dislike its keys or its clock."""
OF_SERVERS = ("verifier.", "capture.")
"""Families of codes of a verifier's server: the worker's own engine, unless the job names one that runs elsewhere."""


def blames(job: Job, failure: Failure) -> bool:
    """Whether `failure` at a unit of `job` says something about its worker."""
    if failure.cause != Cause.FAILED or not failure.retryable:
        return False
    code = str(failure.problem.get("code", ""))
    if code in ELSEWHERES or code.startswith(ELSEWHERE):
        return False
    named = any(job.spec.get(section, {}).get("endpoint") for section in ("verifier", "extraction"))
    return not (named and code.startswith(OF_SERVERS))


@dataclass(frozen=True)
class Blamed:
    """An ended attempt and whose unit it was."""

    attempt: Attempt
    unit: Unit


class HealthRepository:
    """All SQL about how workers did."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def worker(self, worker_id: str) -> Worker | None:
        """The worker, locked."""
        return self.session.scalar(select(Worker).where(Worker.id == worker_id).with_for_update())

    def last_ends(self, worker: Worker, count: int) -> list[Blamed]:
        """The worker's newest attempts that ended by themselves since it was last readmitted, newest first."""
        query: Select[Attempt, Unit] = (
            select(Attempt, Unit)
            .join(Unit, Unit.id == Attempt.unit_id)
            .where(Attempt.worker_id == worker.id, Attempt.ended_at > worker.readmitted_at)
            .where(Attempt.cause.in_(("committed", Cause.FAILED)))
            .order_by(Attempt.ended_at.desc(), Attempt.started_at.desc())
            .limit(count)
        )
        return [Blamed(attempt, unit) for attempt, unit in self.session.execute(query)]

    def others_succeed(self, worker_id: str, unit: Unit, since: float) -> bool:
        """Whether another worker committed a unit of the same job and stage since then."""
        query = (
            select(Attempt.unit_id)
            .join(Unit, Unit.id == Attempt.unit_id)
            .where(Unit.job_id == unit.job_id, Unit.stage == unit.stage, Attempt.worker_id != worker_id)
            .where(Attempt.cause == "committed", Attempt.ended_at >= since)
        )
        return self.session.scalar(query.limit(1)) is not None


def judge(session: Session, job: Job, worker_id: str, now: float) -> None:
    """Set a worker aside if its newest failure, at a unit of `job` (which is locked), is one too many."""
    health = HealthRepository(session)
    worker = health.worker(worker_id)
    if worker is None or worker.set_aside is not None:
        return
    streak = health.last_ends(worker, STREAK)
    units = {end.unit.id for end in streak}
    if len(units) < STREAK or not all(end.attempt.blames_worker for end in streak):
        return
    jobs = {end.unit.job_id for end in streak}
    began = min(end.attempt.started_at for end in streak)
    if len(jobs) == 1 and not any(health.others_succeed(worker_id, end.unit, began) for end in streak):
        return
    last = (streak[0].attempt.problem or {}).get("detail")
    why = WorkerSetAside(
        f"worker {worker_id} failed {len(streak)} units in a row, the last with: {last}",
        remedy=f"look at its log and its machine, then POST /workers/{worker_id}/readmit",
    )
    worker.set_aside, worker.set_aside_at = why.problem(), now
    logger.warning("%s", why.detail)
    History(session).event(job, now, "worker.set_aside", why.detail, "warning", worker=worker_id)


def readmit(session: Session, worker: Worker, now: float) -> None:
    """Let a worker have work again; what it failed before is forgotten."""
    worker.set_aside = worker.set_aside_at = None
    worker.readmitted_at = now
    tell(session, "work")
