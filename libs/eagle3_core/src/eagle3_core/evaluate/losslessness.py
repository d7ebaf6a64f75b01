"""Is the drafted answer the verifier's own?

In float32 the two must be equal token by token. In lower precision one pass over K+1 tokens rounds otherwise than K+1
passes over one, so two tokens whose logits are almost equal may change places, and from there on the answers differ
rightly. So the first token that differs is replayed: one pass over the text before it, and the two tokens' logits must
lie within a stated bound of the best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from eagle3_core.verifier.generation import Engine


@dataclass(frozen=True)
class Verdict:
    """How a drafted answer compares with the plain one."""

    equal: bool
    near_tie: bool
    """Whether they differ first where the verifier itself was undecided."""
    first_difference: int | None
    """Position in the answer."""
    gap: float | None
    """Distance of the worse of the two tokens from the best logit, in the replay."""


class ReplayEngine(Engine, Protocol):
    """An engine that says in which precision it runs."""

    dtype: torch.dtype


Replay = Callable[[list[int], tuple[int, int]], float]
"""The gap behind a text (token ids): how far the worse of two tokens' logits lies below the best logit."""


def compare(engine: ReplayEngine, prompt: list[int], drafted: list[int], plain: list[int], bound: float) -> Verdict:
    """Compare two answers to `prompt`; `bound` is the largest logit gap of a near-tie (never granted in float32)."""

    def replay(context: list[int], tokens: tuple[int, int]) -> float:
        ids = torch.tensor([context], device=engine.device)
        slots = torch.arange(len(context), device=engine.device)[None]
        last = torch.tensor([len(context) - 1], device=engine.device)
        logits_V = engine.forward(ids, slots, engine.cache(1, len(context)), last_R=last).logits[0].float()
        return float(logits_V.max() - logits_V[list(tokens)].min())

    return judge(replay, prompt, drafted, plain, bound, exact=engine.dtype == torch.float32)


def judge(
    replay: Replay, prompt: list[int], drafted: list[int], plain: list[int], bound: float, *, exact: bool
) -> Verdict:
    """As `compare`, with whatever replays a text; `exact` where no near-tie is granted."""
    if drafted == plain:
        return Verdict(True, False, None, None)
    pairs = list(zip(drafted, plain, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if first == len(pairs):  # one ends where the other goes on: no tie explains that
        return Verdict(False, False, first, None)
    gap = replay([*prompt, *plain[:first]], pairs[first])
    return Verdict(False, not exact and gap <= bound, first, gap)
