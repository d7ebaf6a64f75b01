"""Whether the process lives, and whether it can do its work."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from aerie_api.house import House, house_of
from eagle3_core.errors import AerieError

router = APIRouter(tags=["health"])


class NotReady(AerieError):
    """The API cannot do its work."""

    code, status, retryable = "api.not_ready", 503, True


class Alive(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """The process can do its work."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    status: Literal["ready"] = "ready"
    store_free_bytes: int | None
    """Room in the object store; null where it does not say."""


@router.get("/healthz", operation_id="healthz")
def healthz() -> Alive:
    """Whether the process lives."""
    return Alive()


@router.get("/readyz", operation_id="readyz")
def readyz(inside: Annotated[House, Depends(house_of)]) -> Ready:
    """Whether database, object store and reaper work."""
    try:
        with inside.db.read() as session:
            session.execute(text("SELECT 1 FROM jobs LIMIT 1"))
        free = inside.store.free_bytes()
    except (SQLAlchemyError, OSError) as error:
        raise NotReady(f"{type(error).__name__}: {error}", remedy="see the API's log") from error
    if inside.watched and not (inside.reaper.alive and inside.reaper.failing is None):
        why = inside.reaper.failing or "its thread has ended"
        raise NotReady(f"the reaper does not work: {why}", remedy="free disk space, or restart the API")
    return Ready(store_free_bytes=free)
