"""Holds a demo report against what the demo promises: `python tests/check_demo_report.py .aerie/demo/report.json`.

Figures, never seconds: how long a machine took is printed, not judged.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TASKS = 5
PROMPTS = 60


def faults(report: dict[str, Any]) -> list[str]:
    """What the report lacks, as sentences."""
    length = report["acceptance_length"]
    folders = [Path(report["drafter"]["sglang_dir"]), Path(report["drafter"]["speculators_dir"])]
    checks = {
        f"verdict is {report['verdict']}": report["verdict"] == "pass",
        f"status is {report['status']}": report["status"] == "succeeded",
        f"{report['prompts']} held-out prompts": report["prompts"] >= PROMPTS,
        f"{len(length['by_task'])} tasks": len(length["by_task"]) >= TASKS,
        f"mean {length['mean']}": length["mean"] >= 2.0,
        f"ci_low {length['ci_low']}": length["ci_low"] >= 1.85,
        f"macro {length['macro']}": length["macro"] >= 1.9,
        f"by_task { ({t: v['mean'] for t, v in length['by_task'].items()}) }": all(
            v["mean"] >= 1.5 for v in length["by_task"].values()
        ),
        f"lossless is {report['lossless']}": report["lossless"] is True,
        f"looping_share {report['looping_share']}": report["looping_share"] <= 0.15,
        "seen_ngram_share is reported": 0 <= report["seen_ngram_share"] <= 1,
        "acceptance_by_position has one entry a step": len(report["acceptance_by_position"]) == 3,
        "both drafter folders hold config and tensors": all(
            (folder / name).is_file() for folder in folders for name in ("config.json", "model.safetensors")
        ),
    }
    return [name for name, holds in checks.items() if not holds]


def main() -> int:
    """Print the figures and the faults; 1 if there are any."""
    report = json.loads(Path(sys.argv[1]).read_text())
    missing = faults(report)
    length = report["acceptance_length"]
    seconds = sum(stage["seconds"] for stage in report["stages"])
    sys.stdout.write(
        f"AL {length['mean']:.3f} [{length['ci_low']:.3f}, {length['ci_high']:.3f}], macro {length['macro']:.3f}, "
        f"looping {report['looping_share']:.3f}, stages {seconds:.0f} s\n"
    )
    for fault in missing:
        sys.stdout.write(f"not as promised: {fault}\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
