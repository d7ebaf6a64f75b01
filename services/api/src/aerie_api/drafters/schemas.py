"""What a finished job found out about its drafter, and a drafter as it goes over the wire."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class TaskAcceptance(BaseModel):
    """Acceptance length of one task."""

    model_config = ConfigDict(extra="allow")

    mean: float
    ci_low: float
    ci_high: float
    prompts: int


class AcceptanceLength(BaseModel):
    """(Tokens after the first) / verify calls; 1.0 means that the drafter is useless."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    mean: float
    """Pooled over tokens."""
    macro: float
    """Mean over tasks."""
    ci_low: float
    """Lower end of the bootstrap 95 % interval of `mean`."""
    ci_high: float
    by_task: dict[str, TaskAcceptance]


class Figures(BaseModel):
    """The evaluation's report."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    verdict: Literal["pass", "fail"]
    """The gate's decision."""
    acceptance_length: AcceptanceLength
    acceptance_by_position: list[float | None]
    """Chance that the draft at position k is accepted, given that those before it were."""
    lossless: bool
    near_tie_share: float | None = None
    """Share of the prompts whose drafted answer leaves the verifier's own at a near-tie; 0 in float32."""
    looping_share: float
    seen_ngram_share: float | None = None
    prompts: int


class Drafter(BaseModel):
    """A finished drafter."""

    object: Literal["drafter"] = "drafter"
    name: str
    job: str
    digest: str
    verdict: Literal["pass", "fail"]
    acceptance_length: AcceptanceLength
    created_at: float


class DrafterList(BaseModel):
    """Every finished drafter of the tenant, newest first."""

    object: Literal["list"] = "list"
    data: list[Drafter]
    has_more: bool = False
    first_id: str | None
    last_id: str | None
