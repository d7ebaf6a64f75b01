"""From one row a prompt to what a drafter is worth: acceptance length with its interval, by task, and the warnings.

`mean` pools over tokens: (sum of tokens after the first) / (sum of verify calls), so long answers weigh more, as they do
in serving. `macro` is the plain mean over tasks. The interval is a bootstrap over prompts, since the tokens of one
answer are not independent: 2,000 resamples, 2.5 to 97.5 %, with a fixed seed. It covers the choice of prompts and
nothing else, so not the training seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eagle3_core.evaluate.gate import decide
from eagle3_core.jobs.spec import Evaluation

RESAMPLES = 2000
SEED = 0
DIGITS = 4
LOOPING_LIMIT = 0.2
"""Share of looping answers above which an acceptance length says more about repetition than about text."""
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
    return {"mean": _rounded(mean), "ci_low": _rounded(low), "ci_high": _rounded(high)}


def acceptance_by_position(rows: Sequence[Row]) -> list[float | None]:
    """Conditional acceptance of draft 1..K: right, among those whose predecessors were all right; None where none was."""
    if not rows:
        return []
    proposed = np.sum([row["proposed"] for row in rows], axis=0)
    accepted = np.sum([row["accepted"] for row in rows], axis=0)
    return [_rounded(a / p) if p else None for a, p in zip(accepted, proposed, strict=True)]


def predicted_speedup(mean: float, costs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the measured costs (one mapping a unit) predict at batch 1; None where nothing was measured."""
    if not costs:
        return None
    median = {
        key: statistics.median(float(c[key]) for c in costs) for key in ("verify_1_ms", "verify_chain_ms", "draft_ms")
    }
    round_ms = median["verify_chain_ms"] + median["draft_ms"]
    return {
        "factor": _rounded(mean * median["verify_1_ms"] / round_ms),
        "break_even_acceptance_length": _rounded(round_ms / median["verify_1_ms"]),
        "kind": "predicted from measured costs at batch 1",
        **{key: _rounded(value) for key, value in median.items()},
        "device": costs[0]["device"],
        "threads": costs[0]["threads"],
    }


def combine(rows: Sequence[Row], evaluation: Evaluation, costs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The report on all prompts, with the gate's verdict. Rows are those of `prompts.json`."""
    by_task: dict[str, dict[str, float]] = {}
    for task in sorted({row["task"] for row in rows}):
        own = [row for row in rows if row["task"] == task]
        by_task[task] = {**acceptance_length(own), "prompts": len(own)}
    pooled = acceptance_length(rows)
    ngrams = sum(row["ngrams"] for row in rows)
    macro = statistics.fmean(t["mean"] for t in by_task.values()) if by_task else 1.0
    report: dict[str, Any] = {
        "acceptance_length": {**pooled, "macro": _rounded(macro), "by_task": by_task},
        "acceptance_by_position": acceptance_by_position(rows),
        "lossless": bool(rows) and all(row["lossless"] for row in rows),
        "near_tie_share": _share(rows, "near_tie"),
        "looping_share": _share(rows, "looping"),
        "seen_ngram_share": _rounded(sum(row["seen_ngrams"] for row in rows) / ngrams) if ngrams else 0.0,
        "prompts": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "verify_calls": sum(row["calls"] for row in rows),
        "predicted_speedup": predicted_speedup(pooled["mean"], costs),
    }
    verdict, reasons = decide(report, evaluation.gate)
    return {**report, "verdict": verdict, "reasons": reasons}


def doubts(report: Mapping[str, Any]) -> Iterator[str]:
    """What speaks against trusting or using what `report` (see `combine`) says, each with its figure and a remedy."""
    if report["looping_share"] > LOOPING_LIMIT:
        yield (
            f"{report['looping_share']:.0%} of the answers loop, which flatters the acceptance length: measure with other "
            "prompts or with a smaller evaluation.max_new_tokens"
        )
    speedup = report["predicted_speedup"]
    if speedup is not None and speedup["factor"] < 1:
        yield (
            f"the predicted speed-up at batch 1 is {speedup['factor']:.2f}: serving would be slower with this drafter, which "
            f"breaks even at an acceptance length of {speedup['break_even_acceptance_length']:.2f} and has "
            f"{report['acceptance_length']['mean']:.2f}; train on more data, or draft fewer evaluation.num_steps"
        )


def _share(rows: Sequence[Row], key: str) -> float:
    return _rounded(sum(bool(row[key]) for row in rows) / len(rows)) if rows else 0.0


def _rounded(value: float | np.floating[Any]) -> float:
    return round(float(value), DIGITS)
