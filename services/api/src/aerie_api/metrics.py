"""What Prometheus reads of an API process. docs/runbook.md says what to do when a figure is bad.

Two kinds. What happens is counted where it happens, and only once the transaction that did it is committed. How things
stand (queues, jobs, leases) is read from the database at each scrape, so every replica tells the same and none keeps
books; add these over replicas with `max`, not `sum`.

Labels come from closed sets: queues, stages, statuses, causes, route templates, classes of status codes. Never a job, a
tenant, a worker or a path, which would grow without end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import and_, case, event, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from aerie_api.tables import Job, StageRow, Unit, Worker
from eagle3_core.jobs.graph import Queue, StageName
from eagle3_core.jobs.states import JobStatus, UnitState

if TYPE_CHECKING:
    from aerie_api.house import House

QUEUES: tuple[str, ...] = get_args(Queue)
STAGES: tuple[str, ...] = get_args(StageName)
WORKER_SEEN_S = 150.0
"""As `leases.repository.WORKER_GONE_S`."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})
UNMATCHED = "(none)"
logger = logging.getLogger(__name__)

REQUESTS = Histogram(
    "aerie_http_request_seconds", "Time to answer, by route template.", ["method", "route", "status"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60), registry=None,
)  # fmt: skip
ATTEMPTS = Counter("aerie_attempts", "Attempts at units that ended, by cause.", ["stage", "cause"], registry=None)
LOSSES = Counter("aerie_lease_losses", "Leases taken back from workers.", ["stage"], registry=None)
UNIT_SECONDS = Histogram(
    "aerie_unit_seconds", "Time that a committed unit took its worker.", ["stage"],
    buckets=(1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600), registry=None,
)  # fmt: skip
STAGE_SECONDS = Histogram(
    "aerie_stage_seconds", "Time in which a unit of the stage ran, of stages that ended.", ["stage"],
    buckets=(1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600), registry=None,
)  # fmt: skip
BYTES = Counter("aerie_stored_bytes", "Bytes behind committed results.", ["stage"], registry=None)
LENGTH = Histogram(
    "aerie_acceptance_length", "Mean acceptance length of finished drafters.",
    buckets=(1.0, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 5, 6), registry=None,
)  # fmt: skip
EVENTS = (REQUESTS, ATTEMPTS, LOSSES, UNIT_SECONDS, STAGE_SECONDS, BYTES, LENGTH)


def once_committed(session: Session, count: Callable[[], object]) -> None:
    """Call `count` when the transaction of `session` is committed, and not if it is undone."""
    event.listen(session, "after_commit", lambda _session: count(), once=True)


def observe_request(method: str, route: str | None, status: int, seconds: float) -> None:
    """Note one answered request."""
    known = method if method in METHODS else "OTHER"
    REQUESTS.labels(known, route or UNMATCHED, f"{status // 100}xx").observe(seconds)


def registry_of(house: House) -> CollectorRegistry:
    """Everything that this process tells."""
    registry = CollectorRegistry()
    for metric in EVENTS:
        registry.register(metric)
    registry.register(Standing(house))
    return registry


class Standing(Collector):
    """How things stand, read at each scrape. A database that does not answer is `aerie_database_up 0`, and nothing else."""

    def __init__(self, house: House) -> None:
        self._house = house

    def describe(self) -> list[Any]:
        """Nothing ahead of the first scrape: that would read the database."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges."""
        house, now = self._house, self._house.clock()
        yield _one("aerie_reaper_up", "Whether the reaper works.", house.reaper.alive and not house.reaper.failing)
        if house.ringer is not None:
            yield _one("aerie_broker_up", "Whether rings can be sent.", house.ringer.failing is None)
        try:
            with house.db.read() as session:
                found = [*_queues(session, now), _jobs(session), *_units(session), _fleet(session, now)]
        except SQLAlchemyError as error:
            logger.warning("metrics: the database does not answer: %s", type(error).__name__)
            found = [_one("aerie_database_up", "Whether the database answers.", False)]
        else:
            found.append(_one("aerie_database_up", "Whether the database answers.", True))
        yield from found
        try:
            free = house.store.free_bytes()
        except OSError:
            free = None
        if free is not None:
            yield _one("aerie_store_free_bytes", "Room in the object store.", free)


def _one(name: str, told: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, told, value=float(value))


def _queues(session: Session, now: float) -> list[GaugeMetricFamily]:
    since = case((Unit.not_before > StageRow.planned_at, Unit.not_before), else_=StageRow.planned_at)
    query = select(Unit.queue, func.count(), func.min(since)).join(
        StageRow, and_(StageRow.job_id == Unit.job_id, StageRow.name == Unit.stage)
    )
    due = query.where(Unit.state == UnitState.QUEUED, Unit.not_before <= now).group_by(Unit.queue)
    found = {queue: (count, oldest) for queue, count, oldest in session.execute(due)}
    length = GaugeMetricFamily("aerie_queue_units", "Units that could be claimed.", labels=["queue"])
    age = GaugeMetricFamily(
        "aerie_queue_age_seconds", "How long the longest waiting of them has been due.", labels=["queue"]
    )
    for queue in QUEUES:
        count, oldest = found.get(queue, (0, now))
        length.add_metric([queue], count)
        age.add_metric([queue], max(0.0, now - (oldest or now)))
    return [length, age]


def _jobs(session: Session) -> GaugeMetricFamily:
    found = {status: count for status, count in session.execute(select(Job.status, func.count()).group_by(Job.status))}
    jobs = GaugeMetricFamily("aerie_jobs", "Jobs by status.", labels=["status"])
    for status in JobStatus:
        jobs.add_metric([status.value], found.get(status.value, 0))
    return jobs


def _units(session: Session) -> list[GaugeMetricFamily]:
    running = GaugeMetricFamily("aerie_running_units", "Units that workers hold.", labels=["stage"])
    rates = GaugeMetricFamily("aerie_tokens_per_second", "What workers report, added up.", labels=["stage"])
    held, rate = dict.fromkeys(STAGES, 0), dict[str, float]()
    for stage, progress in session.execute(select(Unit.stage, Unit.progress).where(Unit.state == UnitState.RUNNING)):
        held[stage] = held.get(stage, 0) + 1
        rate[stage] = rate.get(stage, 0.0) + float((progress or {}).get("tokens_per_s") or 0.0)
    for stage in STAGES:
        running.add_metric([stage], held[stage])
        rates.add_metric([stage], rate.get(stage, 0.0))
    return [running, rates]


def _fleet(session: Session, now: float) -> GaugeMetricFamily:
    workers = GaugeMetricFamily("aerie_workers", "Workers seen lately, by whether they get work.", labels=["state"])
    counts = {"serving": 0, "set_aside": 0}
    query = select(Worker.set_aside).where(Worker.last_seen >= now - WORKER_SEEN_S)
    for aside in session.scalars(query):
        counts["serving" if aside is None else "set_aside"] += 1
    for state, count in counts.items():
        workers.add_metric([state], count)
    return workers
