"""From the results of a stage's units to the result of the stage, which the API shows and later stages read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_core.evaluate.report import combine, doubts
from eagle3_core.jobs.graph import STAGES, StageName
from eagle3_core.jobs.spec import JobSpec


def reduce(stage: StageName, spec: JobSpec, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of `stage` from those of its units, in order: the report for `evaluate`, sums where units split samples.

    `warnings` of units (a list of sentences under that name) are the stage's, each once; the report adds its own.
    """
    reduced = _reduced(stage, spec, results)
    warnings = dict.fromkeys(str(text) for result in results for text in result.get("warnings") or ())
    if stage == "evaluate":
        warnings |= dict.fromkeys(doubts(reduced))
    return {**reduced, "warnings": list(warnings)} if warnings else reduced


def _reduced(stage: StageName, spec: JobSpec, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if stage == "evaluate":
        rows = [row for result in results for row in result["rows"]]
        parts = ([r[name] for r in results if r.get(name)] for name in ("costs", "serving"))
        return combine(rows, spec.evaluation, *parts)
    if not STAGES[stage].fans_out:
        (only,) = results
        return dict(only)
    names = dict.fromkeys(name for result in results for name, value in result.items() if isinstance(value, int))
    total: dict[str, Any] = {name: sum(result.get(name, 0) for result in results) for name in names}
    if stage == "generate":
        samples = total.get("samples", 0)
        total |= {f"{name}_share": round(total[name] / samples, 4) if samples else 0.0 for name in ("ended", "looping")}
    if stage == "extract":
        total["pass"] = "+".join(sorted({str(result["pass"]) for result in results}))
    return total
