"""Holds a demo report against what the demo promises: `python tests/check_demo_report.py .aerie/demo/report.json`.

Figures, never seconds: how long a machine took is printed, not judged. What is missing or null is a fault like any other.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TASKS = 5
PROMPTS = 60
STEPS = 3
STAGES = ["prepare", "canary", "generate", "extract", "vocab", "train", "evaluate", "package"]
Report = dict[str, Any]


def _share(value: Any) -> bool:
    return isinstance(value, float | int) and 0 <= value <= 1


def _is_drafter(folder: str) -> bool:
    return all((Path(folder) / name).is_file() for name in ("config.json", "model.safetensors"))


PROMISES: dict[str, Callable[[Report], bool]] = {
    "job_id names a job": lambda r: r["job_id"].startswith("job_"),
    "status is succeeded": lambda r: r["status"] == "succeeded",
    "verdict is pass": lambda r: r["verdict"] == "pass",
    "every task has its prompts": lambda r: (
        sum(task["prompts"] for task in r["acceptance_length"]["by_task"].values()) == r["prompts"]
    ),
    "the interval holds the mean": lambda r: (
        r["acceptance_length"]["ci_low"] <= r["acceptance_length"]["mean"] <= r["acceptance_length"]["ci_high"]
    ),
    "every task has an interval around its mean": lambda r: all(
        task["ci_low"] <= task["mean"] <= task["ci_high"] for task in r["acceptance_length"]["by_task"].values()
    ),
    "a speed-up is predicted, and called so": lambda r: (
        r["predicted_speedup"]["factor"] > 0 and r["predicted_speedup"]["kind"].startswith("predicted")
    ),
    "lossless is true": lambda r: r["lossless"] is True,
    "near_tie_share is 0 in float32": lambda r: r["near_tie_share"] == 0,
    "seen_ngram_share is a share": lambda r: _share(r["seen_ngram_share"]),
    f"acceptance_by_position holds {STEPS} shares": lambda r: (
        len(r["acceptance_by_position"]) == STEPS and all(map(_share, r["acceptance_by_position"]))
    ),
    "stages are the eight, in order": lambda r: [stage["name"] for stage in r["stages"]] == STAGES,
    "every stage took time or was reused": lambda r: all(
        stage["seconds"] > 0 or stage["reused"] for stage in r["stages"]
    ),
    "drafter.digest is a BLAKE3": lambda r: re.fullmatch(r"[0-9a-f]{64}", r["drafter"]["digest"]) is not None,
    "drafter.sglang_dir is a drafter": lambda r: _is_drafter(r["drafter"]["sglang_dir"]),
    "drafter.speculators_dir is a drafter": lambda r: _is_drafter(r["drafter"]["speculators_dir"]),
}
LEVEL: dict[str, Callable[[Report], bool]] = {
    f"at least {PROMPTS} held-out prompts": lambda r: r["prompts"] >= PROMPTS,
    f"at least {TASKS} tasks": lambda r: len(r["acceptance_length"]["by_task"]) >= TASKS,
    "mean is at least 2.0": lambda r: r["acceptance_length"]["mean"] >= 2.0,
    "ci_low is at least 1.85": lambda r: r["acceptance_length"]["ci_low"] >= 1.85,
    "macro is at least 1.9": lambda r: r["acceptance_length"]["macro"] >= 1.9,
    "every task's mean is at least 1.5": lambda r: all(
        task["mean"] >= 1.5 for task in r["acceptance_length"]["by_task"].values()
    ),
    "looping_share is at most 0.15": lambda r: 0 <= r["looping_share"] <= 0.15,
}
"""What the drafter of the whole demo reaches."""
SERVED: dict[str, Callable[[Report], bool]] = {
    "served as promised": lambda r: r["acceptance_length_served"]["mean"] == r["acceptance_length"]["mean"] >= 1,
    "every prompt took the promised verify calls": lambda r: r["serving"]["prompts_counted_otherwise"] == 0,
    "serving is lossless": lambda r: r["serving"]["lossless"] is True,
    "timed at one, four and sixteen in flight": lambda r: (
        [at["in_flight"] for at in r["serving"]["speedup"]] == [1, 4, 16]
    ),
}
"""What serving made of the small drafter of `make demo BACKEND=sglang`."""


def faults(report: Report) -> list[str]:
    """Which promises `report` does not keep; a field that is missing, null or of another type keeps none.

    A job through SGLang is small: the level that its drafter reaches is not judged, what serving made of it is.
    """
    asked = PROMISES | (LEVEL if report.get("serving") is None else SERVED)
    return [promise for promise, holds in asked.items() if not _kept(holds, report)]


def _kept(holds: Callable[[Report], bool], report: Report) -> bool:
    try:
        return holds(report)
    except (KeyError, TypeError, AttributeError):
        return False


def main() -> int:
    """Print the figures and the faults; 1 if there are any."""
    report = json.loads(Path(sys.argv[1]).read_text())
    length = report.get("acceptance_length") or {}
    seconds = sum(stage["seconds"] for stage in report.get("stages") or [])
    sys.stdout.write(
        f"AL {length.get('mean')} [{length.get('ci_low')}, {length.get('ci_high')}], macro {length.get('macro')}, "
        f"looping {report.get('looping_share')}, stages {seconds:.0f} s\n"
    )
    missing = faults(report)
    for fault in missing:
        sys.stdout.write(f"not as promised: {fault}\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
