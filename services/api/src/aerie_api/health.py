"""What this is, whether the process lives, and whether it can do its work."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from aerie_api.engines import in_short
from aerie_api.house import House, house_of
from eagle3_core.errors import AerieError

router = APIRouter(tags=["health"])


class NotReady(AerieError):
    """The API cannot do its work."""

    code, status, retryable = "api.not_ready", 503, True


class Front(BaseModel):
    """What answers here, and where to go on."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    service: Literal["aerie"] = "aerie"
    version: str
    openapi: str = "/openapi.json"
    """Every route, field and answer."""
    jobs: str = "/v1/jobs"
    """Where jobs are posted and listed."""
    drafters: str = "/v1/drafters"
    """Where finished drafters are listed."""
    healthz: str = "/healthz"
    """Whether the process lives."""
    readyz: str = "/readyz"
    """Whether it can do its work."""


class Alive(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """The process can do its work."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    status: Literal["ready", "degraded"] = "ready"
    """`degraded`: everything works, and slower: workers find work by asking."""
    store_free_bytes: int | None
    """Room in the object store; null where it does not say."""
    broker: str | None
    """`ok`, or what it failed with; null where no broker is used."""


@router.get("/", operation_id="front")
def front(request: Request) -> Front:
    """What this is and where to go on, for whoever opens the bare address."""
    return Front(version=request.app.version)


@router.get("/healthz", operation_id="healthz")
def healthz() -> Alive:
    """Whether the process lives."""
    return Alive()


@router.get("/readyz", operation_id="readyz")
def readyz(inside: Annotated[House, Depends(house_of)]) -> Ready:
    """Whether database, object store and reaper work.

    A broker that is away is said but is no reason to be taken out of service: without the API workers could not even ask.
    """
    try:
        with inside.db.read() as session:
            session.execute(text("SELECT 1 FROM jobs LIMIT 1"))
        free = inside.store.free_bytes()
    except (SQLAlchemyError, OSError) as error:
        raise NotReady(in_short(error), remedy="see the API's log") from error
    if inside.watched and not (inside.reaper.alive and inside.reaper.failing is None):
        why = inside.reaper.failing or "its thread has ended"
        raise NotReady(f"the reaper does not work: {why}", remedy="free disk space, or restart the API")
    if inside.watched and inside.ringer is not None and not inside.ringer.alive:
        raise NotReady("the thread that rings for work has ended", remedy="restart the API; its log says why it ended")
    failing = inside.ringer.failing if inside.ringer is not None else None
    return Ready(
        status="degraded" if failing else "ready", store_free_bytes=free,
        broker=None if inside.ringer is None else failing or "ok",
    )  # fmt: skip
