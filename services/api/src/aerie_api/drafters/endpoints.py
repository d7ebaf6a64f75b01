"""HTTP of drafters."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from aerie_api.drafters.schemas import DrafterList
from aerie_api.drafters.service import DrafterService

router = APIRouter(tags=["drafters"])


@router.get("/drafters", operation_id="list_drafters")
def list_drafters(
    request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> DrafterList:
    """Finished drafters, newest first."""
    service: DrafterService = request.app.state.house.drafters
    return service.list(limit, after)
