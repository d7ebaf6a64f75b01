"""The demo's `report.json`: the figures of its job, where the drafter lies, and how long it all took."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aerie_cli.output import remark
from aerie_cli.report import duration, from_earlier_jobs
from eagle3_core import strict_json


def make_report(job: dict[str, Any], drafter: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    """What the demo found, as it is written to report.json. The same figures come from GET /jobs/{id}."""
    figures = (
        "verdict", "acceptance_length", "acceptance_by_position", "lossless", "near_tie_share", "seen_ngram_share", "prompts",
        "looping_share", "predicted_speedup", "reasons", "acceptance_length_served", "serving",
    )  # fmt: skip
    return {
        "job_id": job["id"],
        "name": job["name"],
        "status": job["status"],
        **{name: job.get(name) for name in figures},
        "stages": [_stage_row(stage, job["id"]) for stage in job["stages"]],
        "drafter": drafter,
        "reason": job.get("reason"),
        "seconds": round(seconds, 1),
    }


def _stage_row(stage: dict[str, Any], job_id: str) -> dict[str, Any]:
    return {
        "name": stage["name"],
        "seconds": stage.get("seconds") or 0.0,
        "reused": bool(stage.get("reused")),
        "reused_units": stage.get("reused_units") or 0,
        "from_earlier_jobs": from_earlier_jobs(stage, job_id),
    }


def store_report(place: Path, report: dict[str, Any]) -> None:
    """Write `report` to `place` whole; an earlier job's report there gets another name."""
    keep_earlier(place, report["job_id"])
    temporary = place.with_suffix(".new")
    temporary.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(place)


def keep_earlier(place: Path, job_id: str) -> None:
    """Give the report of an earlier job its id as a name, and say so, where the new one is about to take its place."""
    try:
        earlier = strict_json.loads_object(place.read_bytes()).get("job_id")
    except (OSError, ValueError):  # none there, or none that says whose it is
        return
    if isinstance(earlier, str) and earlier != job_id and re.fullmatch(r"job_\w+", earlier):
        kept = place.with_name(f"report-{earlier}.json")
        place.replace(kept)
        remark(
            f"the earlier report is now {kept}; its drafter is still in the store: `aerie up` and `aerie download {earlier}`, "
            f"both with --dir {kept.parent.parent}"
        )


def whereabouts(place: Path, report: dict[str, Any]) -> Iterator[str]:
    """Where everything that the demo made lies, a line each."""
    if drafter := report["drafter"]:
        yield f"drafter {drafter['sglang_dir']} (SGLang), {drafter['speculators_dir']} (speculators, vLLM)"
        yield f"card    {Path(drafter['sglang_dir']).parent / 'card.md'}: what it is worth, and how to serve it"
    yield f"report  {place}, {duration(report['seconds'])} in all"
