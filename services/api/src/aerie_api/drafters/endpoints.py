"""HTTP of drafters."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from aerie_api.auth import Reader
from aerie_api.drafters.schemas import DrafterList
from aerie_api.house import House, house_of

router = APIRouter(tags=["drafters"])


@router.get("/drafters", operation_id="list_drafters")
def list_drafters(
    caller: Reader,
    inside: Annotated[House, Depends(house_of)],
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> DrafterList:
    """Finished drafters, newest first."""
    return inside.drafters.list(caller.tenant, limit, after)
