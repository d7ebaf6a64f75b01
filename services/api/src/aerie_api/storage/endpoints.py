"""HTTP of storage: what is held, and its deletion on request."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from aerie_api.auth import Reader, Writer
from aerie_api.house import House, house_of
from aerie_api.storage.schemas import DeletedObjects, DeletionProof, DeletionRequest, StorageUse

router = APIRouter(tags=["storage"])
Inside = Annotated[House, Depends(house_of)]


@router.get("/storage", operation_id="get_storage")
def get_storage(caller: Reader, inside: Inside) -> StorageUse:
    """What results hold, by stage, and what they may hold."""
    return inside.storage.use(caller.tenant)


@router.post("/storage/deletions", status_code=201, operation_id="create_deletion")
def create_deletion(caller: Writer, request: DeletionRequest, inside: Inside) -> DeletionProof:
    """Delete what jobs made of a data set, or of all of them, and prove that it is gone."""
    return inside.storage.deletions.delete(caller.tenant, request, caller)


@router.get("/storage/deletions/{deletion_id}", operation_id="get_deletion")
def get_deletion(deletion_id: str, caller: Reader, inside: Inside) -> DeletionProof:
    """How far a deletion is, and its proof."""
    return inside.storage.deletions.proof(caller.tenant, deletion_id)


@router.get("/storage/deletions/{deletion_id}/objects", operation_id="list_deleted_objects")
def list_deleted_objects(
    deletion_id: str,
    caller: Reader,
    inside: Inside,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=10000)] = 1000,
) -> DeletedObjects:
    """What a deletion took: keys, sizes, digests."""
    return inside.storage.deletions.objects(caller.tenant, deletion_id, after, limit)
