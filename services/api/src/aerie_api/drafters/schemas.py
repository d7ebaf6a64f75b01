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


class Speedup(BaseModel):
    """Serving with and without the drafter, timed by turns in one run."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    in_flight: int
    """Requests that the engine was kept busy with."""
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    factor: float
    """Median over rounds of the ratio of the two rates."""


class Serving(BaseModel):
    """What the engine delivered with the drafter."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    engine: str
    """Name and version."""
    device: str
    """Where it ran. What was timed on `cpu` is no figure for GPUs."""
    dtype: str
    drafter: str
    """Digest of the files that were served; the package holds the very same."""
    exact: bool
    """Whether every prompt had to take the promised verify calls (float32)."""
    verify_calls: int
    prompts_counted_otherwise: int
    """Prompts on which the engine counted other tokens or other verify calls than were promised."""
    gap: float
    """Difference between promised and delivered acceptance length, as a share of the promised."""
    lossless: bool
    """Whether its answers with the drafter equal its answers without, or part at near-ties only."""
    near_tie_share: float
    calls_by_right_drafts: list[int]
    """Verify calls by the number of drafts that were right, from none on."""
    speedup: list[Speedup]


class Figures(BaseModel):
    """The evaluation's report."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    verdict: Literal["pass", "fail"]
    """The gate's decision."""
    acceptance_length: AcceptanceLength
    acceptance_length_served: AcceptanceLength | None = None
    """As the engine that serves delivered it."""
    serving: Serving | None = None
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
    acceptance_length_served: AcceptanceLength | None = None
    """As the engine that serves delivered it; null where none was asked."""
    created_at: float


class DrafterList(BaseModel):
    """Every finished drafter of the tenant, newest first."""

    object: Literal["list"] = "list"
    data: list[Drafter]
    has_more: bool = False
    first_id: str | None
    last_id: str | None
