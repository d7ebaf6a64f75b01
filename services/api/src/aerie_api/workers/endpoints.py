"""HTTP of the fleet."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from aerie_api.auth import Admin, Reader
from aerie_api.house import House, house_of
from aerie_api.workers.schemas import Worker, WorkerList

router = APIRouter(tags=["fleet"])
Inside = Annotated[House, Depends(house_of)]


@router.get("/workers", operation_id="list_workers")
def list_workers(
    caller: Reader, inside: Inside, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: str | None = None
) -> WorkerList:
    """Who asked for work, who is at it, who was set aside and why."""
    return inside.workers.list(caller, after, limit)


@router.post("/workers/{worker_id}/readmit", operation_id="readmit_worker")
def readmit_worker(worker_id: str, caller: Admin, inside: Inside) -> Worker:
    """Let a worker have work again that was set aside because it failed unit after unit."""
    return inside.workers.readmit(caller, worker_id)
