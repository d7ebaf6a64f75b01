"""How the drafter is measured, and what it must reach."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, FiniteFloat

from eagle3_core.jobs.sections.base import Positive, Section, Share
from eagle3_core.jobs.sections.sources import DatasetSpec


class Gate(Section):
    """What the drafter must reach; below it the verdict is `fail`."""

    min_mean: Annotated[FiniteFloat, Field(ge=1)] | None = None
    """Least pooled acceptance length."""

    min_ci_low: Annotated[FiniteFloat, Field(ge=1)] = 1.0
    """The lower end of the 95 % interval must lie above this."""

    min_macro: Annotated[FiniteFloat, Field(ge=1)] | None = None
    """Least mean over tasks."""

    min_task: Annotated[FiniteFloat, Field(ge=1)] | None = None
    """Least acceptance length of every task."""

    min_speedup: Annotated[FiniteFloat, Field(ge=0, le=100)] | None = None
    """Least speed-up of serving: as measured at each of evaluation.speed_in_flight where an engine served on a GPU, else as
    predicted at batch 1 from what a verify call, a token and a draft cost where it was measured. 1 fails a drafter that
    would make serving slower; null only warns of it."""

    require_lossless: bool = True
    """Every answer must equal the verifier's own greedy answer (float32), or differ only at near-ties."""

    max_looping_share: Share | None = None
    """Largest share of answers that repeat an 8-gram; looping inflates acceptance."""

    max_served_gap: Share = 0.03
    """Largest difference between the acceptance length that the chain decoder promises and the one that the engine
    delivers, as a share of the promised (verifier.backend sglang). In float32 none is allowed: the verify calls of every
    prompt must be the same."""


class Evaluation(Section):
    """How the drafter is measured: real drafting and verifying on held-out prompts."""

    prompts: Annotated[tuple[DatasetSpec, ...], Field(min_length=1, max_length=64)]
    """Held-out prompts; a line's `task` names its domain in the report."""

    max_prompts: Positive | None = None
    """At most this many, in order."""

    num_steps: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens drafted per verify call."""

    max_new_tokens: Annotated[int, Field(ge=2, le=131072)] = 256
    """Longest answer, in tokens."""

    unit_prompts: Positive = 64
    """Prompts of one unit of `evaluate`."""

    batch_size: Annotated[int, Field(ge=1, le=1024)] = 32
    """Prompts decoded side by side."""

    near_tie_logit_gap: Annotated[FiniteFloat, Field(ge=0, le=4)] | None = None
    """Largest gap between two logits that still counts as a tie when outputs part. null = 0 in float32, and two steps of
    the number format at logits of 16 to 32 in lower precision: 0.25 in bfloat16, 0.03125 in float16. What lies
    further apart than 4 is no tie in any precision."""

    speed_in_flight: Annotated[tuple[Annotated[int, Field(ge=1, le=1024)], ...], Field(max_length=8)] = (1, 4, 16)
    """Requests in flight at which serving is timed with and without the drafter (verifier.backend sglang). [] = none."""

    gate: Gate = Gate()
