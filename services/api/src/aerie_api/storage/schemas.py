"""What goes over the wire about storage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class DeletionRequest(BaseModel):
    """What is to be deleted."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    dataset: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")] | None = None
    """URI of a data set as a job named it, or the digest of its content; null: of every data set of the tenant."""
    everything: bool = False
    """Also drafters, checkpoints and evaluations made of it; false: tokens, answers and hidden states."""


class DeletionProof(BaseModel):
    """A deletion and what is known of it."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["storage.deletion"] = "storage.deletion"
    id: str
    status: Literal["running", "done"]
    dataset: str | None
    everything: bool
    requested_at: float
    finished_at: float | None
    objects: int
    """Objects that went; `/objects` lists them with their digests."""
    bytes: int
    remaining: int | None
    """Objects that a list after the deletion still showed; 0 is the proof."""


class DeletedObject(BaseModel):
    """An object that went."""

    key: str
    size: int
    blake3: str | None


class DeletedObjects(BaseModel):
    """A page of what went."""

    object: Literal["list"] = "list"
    data: list[DeletedObject]
    has_more: bool


class StorageUse(BaseModel):
    """What the tenant's results hold."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    bytes: int
    by_stage: dict[str, int]
    budget_bytes: int | None
    """null: no limit."""
    free_bytes: int | None
    """Room in the store; null where it does not say."""
