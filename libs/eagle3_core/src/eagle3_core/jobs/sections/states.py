"""What the drafter is made from: the verifier's hidden states and the tokens it may propose."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eagle3_core.jobs.sections.base import Section, Share, inconsistent
from eagle3_core.jobs.sections.sources import ServerAddress


class Extraction(Section):
    """How hidden states are captured."""

    aux_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Three layer *inputs* to capture, strictly increasing (layer i's input = Hugging Face `hidden_states[i]`).
    Default [2, N//2, N-3]; models of fewer than 7 layers name theirs."""

    codec: Literal["raw"] = "raw"
    """How states are stored."""

    shard_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = 256 << 20
    """Largest shard file, in bytes."""

    endpoint: ServerAddress | None = None
    """A running SGLang server with the verifier and the capture plug-in, which then gives the states (docs/endpoints.md).
    null = `verifier.backend` gives them, on a worker's own engine."""

    @model_validator(mode="after")
    def _three_increasing(self) -> Extraction:
        layers = self.aux_layers
        if layers is not None and (len(layers) != 3 or list(layers) != sorted(set(layers))):
            raise inconsistent(
                f"extraction.aux_layers must be three strictly increasing layer numbers, and is {list(layers)[:9]}",
                "aux_layers",
                remedy="name three layer inputs in increasing order, as [2, 4, 5], or leave extraction.aux_layers out",
            )
        return self


class Vocab(Section):
    """The drafter's vocabulary: the most frequent tokens of the training answers."""

    draft_vocab_size: Annotated[int, Field(ge=1)] | None = 32000
    """Tokens the drafter can propose; when the data holds fewer distinct ones it gets those, and the stage says so.
    null = all."""

    min_coverage: Share = 0.8
    """Least share of supervised tokens that the draft vocabulary must cover; below it the job fails before it trains.
    Measured on held-out samples, where small data sets reach .91 to .97 and make drafters that work, so that the 98 %
    which large corpora reach on the text they count would refuse too much: below 95 % the job warns."""
