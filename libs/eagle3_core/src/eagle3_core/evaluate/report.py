"""From one row a prompt to what a drafter is worth: acceptance length as promised and as served, and the warnings.

How lengths are pooled, and what their interval covers, stands in `lengths.py`; what serving must keep, in `promise.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eagle3_core.evaluate.gate import decide, measured_speedups
from eagle3_core.evaluate.lengths import length_table, rounded, share
from eagle3_core.evaluate.promise import delivered
from eagle3_core.jobs.spec import Evaluation

LOOPING_LIMIT = 0.2
"""Share of looping answers above which an acceptance length says more about repetition than about text."""
Row = Mapping[str, Any]


def acceptance_by_position(rows: Sequence[Row]) -> list[float | None]:
    """Conditional acceptance of draft 1..K: right, among those whose predecessors were all right; None where none was."""
    if not rows:
        return []
    proposed = np.sum([row["proposed"] for row in rows], axis=0)
    accepted = np.sum([row["accepted"] for row in rows], axis=0)
    return [rounded(a / p) if p else None for a, p in zip(accepted, proposed, strict=True)]


def predicted_speedup(mean: float, costs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the measured costs (one mapping a unit) predict at batch 1; None where nothing was measured."""
    if not costs:
        return None
    median = {
        key: statistics.median(float(c[key]) for c in costs) for key in ("verify_1_ms", "verify_chain_ms", "draft_ms")
    }
    round_ms = median["verify_chain_ms"] + median["draft_ms"]
    return {
        "factor": rounded(mean * median["verify_1_ms"] / round_ms),
        "break_even_acceptance_length": rounded(round_ms / median["verify_1_ms"]),
        "kind": "predicted from measured costs at batch 1",
        **{key: rounded(value) for key, value in median.items()},
        "device": costs[0]["device"],
        "threads": costs[0]["threads"],
    }


def combine(
    rows: Sequence[Row],
    evaluation: Evaluation,
    costs: Sequence[Mapping[str, Any]] = (),
    servings: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The report on all prompts, with the gate's verdict. Rows are those of `prompts.json`; costs and servings the units'."""
    length = length_table(rows)
    ngrams = sum(row["ngrams"] for row in rows)
    report: dict[str, Any] = {
        "acceptance_length": length,
        "acceptance_by_position": acceptance_by_position(rows),
        "lossless": bool(rows) and all(row["lossless"] for row in rows),
        "near_tie_share": share(rows, "near_tie"),
        "looping_share": share(rows, "looping"),
        "seen_ngram_share": rounded(sum(row["seen_ngrams"] for row in rows) / ngrams) if ngrams else 0.0,
        "prompts": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "verify_calls": sum(row["calls"] for row in rows),
        "predicted_speedup": predicted_speedup(length["mean"], costs),
        **delivered(rows, servings),
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
    for at in measured_speedups(report) or ():
        if at["factor"] < 1:
            yield (
                f"serving was slower with this drafter at {at['in_flight']} requests in flight: "
                f"{at['drafted_tokens_per_s']:.0f} tokens/s, {at['plain_tokens_per_s']:.0f} without it; draft fewer "
                "evaluation.num_steps, or serve such load without it"
            )
