"""The check of the demo's report finds whatever the report lacks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import check_demo_report
import pytest


@pytest.fixture
def report(tmp_path: Path) -> dict[str, Any]:
    """A report that keeps every promise."""
    for folder in ("sglang", "speculators"):
        (tmp_path / folder).mkdir()
        for name in ("config.json", "model.safetensors"):
            (tmp_path / folder / name).touch()
    task = {"mean": 2.0, "ci_low": 1.9, "ci_high": 2.2, "prompts": 12}
    return {
        "job_id": "job_1", "status": "succeeded", "verdict": "pass", "prompts": 60,
        "acceptance_length": {
            "mean": 2.1, "ci_low": 1.9, "ci_high": 2.2, "macro": 2.0, "by_task": {name: dict(task) for name in "abcde"},
        },
        "acceptance_by_position": [0.6, 0.5, 0.4], "lossless": True, "near_tie_share": 0.0, "looping_share": 0.1,
        "seen_ngram_share": 0.4,
        "predicted_speedup": {"factor": 1.2, "kind": "predicted from measured costs at batch 1"},
        "stages": [{"name": name, "seconds": 1.0, "reused": False} for name in check_demo_report.STAGES],
        "drafter": {
            "digest": "0" * 64, "sglang_dir": str(tmp_path / "sglang"), "speculators_dir": str(tmp_path / "speculators"),
        },
    }  # fmt: skip


def test_a_report_that_keeps_every_promise_has_no_fault(report):
    assert check_demo_report.faults(report) == []


def leaves(part: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values of a document lie, and the parts that hold them."""
    inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return [place] * bool(place) + [found for key, value in inner for found in leaves(value, (*place, key))]


def without(report: dict[str, Any], place: tuple[Any, ...]) -> dict[str, Any]:
    """`report` with null in one place."""
    changed = copy.deepcopy(report)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = None
    return changed


@pytest.fixture
def served(report) -> dict[str, Any]:
    """A report of the job through SGLang that keeps every promise, with a drafter as small as its job."""
    report["acceptance_length"] |= {"mean": 1.46, "ci_low": 1.3, "ci_high": 1.6}
    report["prompts"] = sum(task["prompts"] for task in report["acceptance_length"]["by_task"].values())
    speedup = [{"in_flight": n, "factor": 0.5} for n in (1, 4, 16)]
    return report | {
        "acceptance_length_served": {"mean": 1.46},
        "serving": {"prompts_counted_otherwise": 0, "lossless": True, "speedup": speedup},
    }


def test_a_served_report_is_judged_by_what_serving_made_of_it(served):
    assert check_demo_report.faults(served) == []


@pytest.mark.parametrize(
    ("place", "value", "promise"),
    [
        (("acceptance_length_served", "mean"), 1.45, "served as promised"),
        (("acceptance_length_served",), None, "served as promised"),
        (("serving", "prompts_counted_otherwise"), 1, "every prompt took the promised verify calls"),
        (("serving", "lossless"), False, "serving is lossless"),
        (("serving", "speedup"), [], "timed at one, four and sixteen in flight"),
    ],
)
def test_each_promise_of_serving_is_held_against_the_report(served, place, value, promise):
    inner = served
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value

    assert check_demo_report.faults(served) == [promise]


def test_null_anywhere_is_a_fault(report):
    judged = [place for place in leaves(report) if place[-1] != "reused"]

    assert [place for place in judged if not check_demo_report.faults(without(report, place))] == []


@pytest.mark.parametrize(
    ("place", "value", "promise"),
    [
        (("verdict",), "fail", "verdict is pass"),
        (("prompts",), 59, "at least 60 held-out prompts"),
        (("acceptance_length", "mean"), 1.99, "mean is at least 2.0"),
        (("acceptance_length", "by_task", "c", "mean"), 1.49, "every task's mean is at least 1.5"),
        (("acceptance_length", "by_task", "c", "ci_low"), 2.1, "every task has an interval around its mean"),
        (("predicted_speedup", "kind"), "measured", "a speed-up is predicted, and called so"),
        (("lossless",), 1, "lossless is true"),
        (("looping_share",), 0.16, "looping_share is at most 0.15"),
        (("seen_ngram_share",), 1.5, "seen_ngram_share is a share"),
        (("stages", 3, "seconds"), 0.0, "every stage took time or was reused"),
        (("drafter", "digest"), "d", "drafter.digest is a BLAKE3"),
        (("drafter", "sglang_dir"), "/nowhere", "drafter.sglang_dir is a drafter"),
    ],
)
def test_each_promise_is_held_against_the_report(report, place, value, promise):
    inner = report
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value

    assert promise in check_demo_report.faults(report)


def test_a_report_of_a_failed_job_is_judged_without_a_crash(tmp_path, monkeypatch, capsys):
    failed = {"job_id": "job_1", "status": "failed", "verdict": None, "acceptance_length": None, "drafter": None}
    (tmp_path / "report.json").write_text(json.dumps(failed))
    monkeypatch.setattr("sys.argv", ["check", str(tmp_path / "report.json")])

    status = check_demo_report.main()

    assert status == 1
    assert "not as promised: status is succeeded" in capsys.readouterr().out
