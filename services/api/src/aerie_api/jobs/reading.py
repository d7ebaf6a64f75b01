"""What people read of a job besides its document: events, lines, curves, attempts."""

from __future__ import annotations

from collections.abc import Sequence

from aerie_api.db import Database
from aerie_api.jobs.history import History
from aerie_api.jobs.repository import JobRepository
from aerie_api.jobs.schemas import (
    AttemptEntry,
    AttemptList,
    EventList,
    JobEvent,
    LogEntry,
    LogList,
    MetricList,
    MetricPoint,
)
from aerie_api.leases.repository import UnitRepository
from aerie_api.tables import Attempt, Event, LogRow, MetricRow, Unit
from eagle3_core.jobs.states import JobStatus


class ReadingService:
    """Reads what a job of a tenant left behind. Every method raises JobMissing."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def events(self, tenant: str, job_id: str, after: int, limit: int) -> EventList:
        """Up to `limit` events with a number above `after`."""
        return self.events_and_end(tenant, job_id, after, limit)[0]

    def events_and_end(self, tenant: str, job_id: str, after: int, limit: int) -> tuple[EventList, bool]:
        """The same, and whether nothing more can come unless a person asks."""
        with self._db.read() as session:
            job = JobRepository(session, tenant).get(job_id)
            rows = History(session).events(job, after, limit + 1)
            ended = JobStatus(job.status).terminal and len(rows) <= limit
        data = [_event(row) for row in rows[:limit]]
        last = data[-1].seq if data else after
        return EventList(data=data, has_more=len(rows) > limit, last_seq=last), ended

    def logs(
        self, tenant: str, job_id: str, *, stage: str | None, unit: int | None, after: int, tail: int | None, limit: int
    ) -> LogList:
        """Lines of a job, of one stage or one unit: the first after a number, or the last ones."""
        with self._db.read() as session:
            job = JobRepository(session, tenant).get(job_id)
            more = None if tail is not None else limit + 1
            rows = History(session).lines(job, stage=stage, unit=unit, after=after, tail=tail, limit=more or limit)
        shown = rows if tail is not None else rows[:limit]
        last = shown[-1].seq if shown else after
        return LogList(data=[_line(row) for row in shown], has_more=len(rows) > len(shown), last_seq=last)

    def metrics(
        self, tenant: str, job_id: str, names: Sequence[str], stage: str | None, since_step: int, limit: int
    ) -> MetricList:
        """Values of curves with a step above `since_step`."""
        with self._db.read() as session:
            job = JobRepository(session, tenant).get(job_id)
            rows = History(session).curve(job, names, stage, since_step, limit + 1)
        return MetricList(data=[_point(row) for row in rows[:limit]], has_more=len(rows) > limit)

    def attempts(self, tenant: str, job_id: str) -> AttemptList:
        """Who tried what, and how it ended."""
        with self._db.read() as session:
            job = JobRepository(session, tenant).get(job_id)
            return AttemptList(data=[_attempt(*pair) for pair in UnitRepository(session, tenant).attempts(job.id)])


def _event(row: Event) -> JobEvent:
    return JobEvent.model_validate(
        {"seq": row.seq, "created_at": row.at, "type": row.type, "level": row.level, "message": row.message, "data": row.data}
    )  # fmt: skip


def _line(row: LogRow) -> LogEntry:
    return LogEntry.model_validate(
        {"seq": row.seq, "stage": row.stage, "unit": row.unit, "attempt": row.attempt, "at": row.at, "level": row.level,
         "text": row.text}
    )  # fmt: skip


def _point(row: MetricRow) -> MetricPoint:
    return MetricPoint.model_validate(
        {"stage": row.stage, "name": row.name, "step": row.step, "unit": row.unit, "value": row.value, "at": row.at}
    )


def _attempt(unit: Unit, row: Attempt) -> AttemptEntry:
    return AttemptEntry.model_validate(
        {"stage": unit.stage, "unit": unit.index, "attempt": row.attempt, "fence": row.fence, "worker": row.worker_id,
         "started_at": row.started_at, "ended_at": row.ended_at, "outcome": row.cause, "problem": row.problem}
    )  # fmt: skip
