"""Whether a drafter is good enough to serve: its report against the job's thresholds, with a reason for every `fail`.

The decisive number is the interval's lower end, not the mean: a drafter that was lucky with its prompts does not pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from eagle3_core.evaluate.promise import broken_promises
from eagle3_core.jobs.spec import Gate


def thresholds(gate: Gate) -> str:
    """What `gate` asks for, as one sentence without its dot."""
    least = [("mean", gate.min_mean), ("mean over tasks", gate.min_macro), ("every task", gate.min_task)]
    asked = [f"interval above {gate.min_ci_low:g}", *(f"{name} at least {x:g}" for name, x in least if x is not None)]
    if gate.min_speedup is not None:
        asked.append(f"speed-up at least {gate.min_speedup:g}")
    if gate.require_lossless:
        asked.append("lossless")
    if gate.max_looping_share is not None:
        asked.append(f"at most {gate.max_looping_share:.0%} looping")
    return ", ".join(asked)


def decide(report: Mapping[str, Any], gate: Gate) -> tuple[Literal["pass", "fail"], list[str]]:
    """The verdict on `report` (see `evaluate.report.combine`), and what it failed on."""
    length: Mapping[str, Any] = report["acceptance_length"]
    reasons: list[str] = []
    if not report["verify_calls"]:
        reasons.append("no prompt led to a single verify call, so nothing was measured")
    if not length["ci_low"] > gate.min_ci_low:
        reasons.append(f"the 95 % interval starts at {length['ci_low']}, it must lie above {gate.min_ci_low}")
    if gate.min_mean is not None and length["mean"] < gate.min_mean:
        reasons.append(f"acceptance length {length['mean']} is below {gate.min_mean}")
    if gate.min_macro is not None and length["macro"] < gate.min_macro:
        reasons.append(f"acceptance length over tasks {length['macro']} is below {gate.min_macro}")
    if gate.min_task is not None:
        reasons += [
            f"acceptance length {task['mean']} of task {name} is below {gate.min_task}"
            for name, task in length["by_task"].items()
            if task["mean"] < gate.min_task
        ]
    if gate.min_speedup is not None:
        reasons += _too_slow(report, gate.min_speedup)
    if gate.require_lossless and not report["lossless"]:
        reasons.append("drafted answers differ from the verifier's own")
    if gate.max_looping_share is not None and report["looping_share"] > gate.max_looping_share:
        reasons.append(f"{report['looping_share']:.0%} of the answers loop, {gate.max_looping_share:.0%} may")
    reasons += broken_promises(report, gate.max_served_gap)
    return ("fail" if reasons else "pass"), reasons


def _too_slow(report: Mapping[str, Any], least: float) -> list[str]:
    """Where serving with the drafter gains too little."""
    measured, predicted = measured_speedups(report), report["predicted_speedup"]
    if measured is not None:
        return [
            f"measured with {at['in_flight']} requests in flight, the speed-up is {at['factor']:.2f}, below {least:g}"
            for at in measured
            if at["factor"] < least
        ]
    if predicted is None:
        return [f"the speed-up must be at least {least:g}, and none is known: no cost was measured"]
    if predicted["factor"] < least:
        return [f"the speed-up predicted at batch 1 is {predicted['factor']:.2f}, below {least:g}"]
    return []


def measured_speedups(report: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """What serving gained at each number of requests in flight; None where no engine served on a GPU, since what a CPU is
    slower at says nothing of GPUs."""
    serving = report["serving"]
    return None if serving is None or serving["device"] == "cpu" else serving["speedup"]
