"""Workers as they go over the wire. Times are seconds since the epoch."""

from __future__ import annotations

from typing import Literal

from aerie_api.jobs.schemas import Answer
from aerie_api.problems import Problem
from eagle3_core.jobs.graph import Queue, StageName

WorkerState = Literal["waiting", "busy", "silent", "set_aside"]


class WorkerUnit(Answer):
    """What a worker is at."""

    job: str
    stage: StageName
    unit: int
    attempt: int
    started_at: float
    last_heartbeat: float | None


class Worker(Answer):
    """A worker that asked for work."""

    id: str
    object: Literal["worker"] = "worker"
    state: WorkerState
    """`silent`: it has not been heard of lately. `set_aside`: it failed unit after unit and gets no more work."""
    queues: list[Queue]
    unit: WorkerUnit | None
    """What it is at; null also for work of other tenants."""
    first_seen: float
    last_seen: float
    set_aside_at: float | None
    reason: Problem | None
    """Why it was set aside."""


class WorkerList(Answer):
    """The workers, by name."""

    object: Literal["list"] = "list"
    data: list[Worker]
    has_more: bool
    first_id: str | None
    last_id: str | None
    """Ask for the next page with `after=` this."""
