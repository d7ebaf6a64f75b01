"""Acceptance length of many prompts: pooled, with its interval, and by task.

`mean` pools over tokens: (sum of tokens after the first) / (sum of verify calls), so long answers weigh more, as they do
in serving. `macro` is the plain mean over tasks. The interval is a bootstrap over prompts, since the tokens of one
answer are not independent: 2,000 resamples, 2.5 to 97.5 %, with a fixed seed. It covers the choice of prompts and
nothing else, so not the training seed. What the chain decoder counted and what a server counted are told in one shape.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000
SEED = 0
DIGITS = 4
Row = Mapping[str, Any]


def acceptance_length(rows: Sequence[Row]) -> dict[str, float]:
    """`mean`, `ci_low`, `ci_high` over prompts. All 1.0 (nothing was accepted) where no verify call was made."""
    counted = [row for row in rows if row["calls"] > 0]
    if not counted:
        return {"mean": 1.0, "ci_low": 1.0, "ci_high": 1.0}
    tokens_P = np.array([row["tokens"] for row in counted], dtype=np.int64)
    calls_P = np.array([row["calls"] for row in counted], dtype=np.int64)
    draws = np.random.default_rng(SEED).integers(0, len(counted), (RESAMPLES, len(counted)))
    low, high = np.percentile(tokens_P[draws].sum(1) / calls_P[draws].sum(1), [2.5, 97.5])
    mean = tokens_P.sum() / calls_P.sum()
    return {"mean": rounded(mean), "ci_low": rounded(low), "ci_high": rounded(high)}


def length_table(rows: Sequence[Row]) -> dict[str, Any]:
    """`acceptance_length` of `rows` with `macro` and `by_task`."""
    by_task: dict[str, dict[str, float]] = {}
    for task in sorted({row["task"] for row in rows}):
        own = [row for row in rows if row["task"] == task]
        by_task[task] = {**acceptance_length(own), "prompts": len(own)}
    macro = statistics.fmean(t["mean"] for t in by_task.values()) if by_task else 1.0
    return {**acceptance_length(rows), "macro": rounded(macro), "by_task": by_task}


def share(rows: Sequence[Row], key: str) -> float:
    """Share of `rows` in which `key` holds."""
    return rounded(sum(bool(row[key]) for row in rows) / len(rows)) if rows else 0.0


def rounded(value: float | np.floating[Any]) -> float:
    """As figures are kept."""
    return round(float(value), DIGITS)
