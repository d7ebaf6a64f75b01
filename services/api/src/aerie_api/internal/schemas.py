"""What workers send beyond the shared wire models: the same, bounded, because it is stored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from eagle3_core.jobs.graph import Queue
from eagle3_core.jobs.wire import ClaimRequest, Stops

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]


class Claim(ClaimRequest):
    """A claim whose names fit the database and the log, for queues that there are."""

    worker_id: Name
    incarnation: Name
    queues: Annotated[list[Queue], Field(min_length=1, max_length=16)]  # type: ignore[assignment]
    only: Annotated[list[Queue], Field(min_length=1, max_length=16)] | None = None  # type: ignore[assignment]


class StopsQuestion(Stops):
    """A question whose names fit the database."""

    worker_id: Name
    incarnation: Name


class Done(BaseModel):
    """It is written down."""

    ok: Literal[True] = True
