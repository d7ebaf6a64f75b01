"""How much faster serving is with the drafter: the same prompts, both servers, in one run, taking turns.

A machine's pace drifts (heat, neighbours, caches), so a rate means something only beside one that was taken a moment
before or after. Every round measures both servers at every level and starts with the other one than the round before.
The prompts lie in both prefix caches by then, so it is decoding that is timed. At one request in flight a verify pass
has idle compute to use; at sixteen it may have none left, which is why one figure would not do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from eagle3_core.evaluate.served import Endpoint, ask
from eagle3_core.verifier.base import Decoding, Progressed

ROUNDS = 2
LEAST_PROMPTS = 4
"""Prompts of one timed run at low levels: one answer alone may be an odd one."""
DIGITS = 4


def measure_speed(
    plain: Endpoint,
    drafting: Endpoint,
    prompts: Sequence[Sequence[int]],
    how: Decoding,
    levels: Sequence[int],
    *,
    on_progress: Progressed,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """One entry a level (requests in flight): answer tokens per second without and with the drafter, and their ratio."""
    rates: dict[tuple[int, bool], list[float]] = {(n, drafts): [] for n in levels for drafts in (False, True)}
    for round_ in range(ROUNDS):
        for level in levels:
            count = max(level, min(LEAST_PROMPTS, len(prompts)))
            asked = [prompts[i % len(prompts)] for i in range(count)]
            for drafts in (False, True) if round_ % 2 == 0 else (True, False):
                started = clock()
                answers = ask(
                    drafting if drafts else plain, asked, replace(how, batch_size=level), drafting=drafts,
                    steady=True, on_progress=on_progress,
                )  # fmt: skip
                rates[level, drafts].append(sum(len(answer.ids) for answer in answers) / (clock() - started))
    return [_entry(level, rates[level, False], rates[level, True]) for level in levels]


def _entry(level: int, plain: Sequence[float], drafted: Sequence[float]) -> dict[str, Any]:
    """The factor is the median over rounds of ratios: each round's two rates were taken side by side."""
    factors = [d / p for d, p in zip(drafted, plain, strict=True)]
    return {
        "in_flight": level,
        "plain_tokens_per_s": round(statistics.median(plain), 2),
        "drafted_tokens_per_s": round(statistics.median(drafted), 2),
        "factor": round(statistics.median(factors), DIGITS),
    }
