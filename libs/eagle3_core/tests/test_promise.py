"""What serving delivers is what was promised, or the verdict is `fail` and says by how much."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3_core.evaluate.report import combine
from eagle3_core.jobs.results import reduce
from eagle3_core.jobs.spec import DatasetSpec, Evaluation, Gate, JobSpec, parse_job

FACTS = {
    "engine": "SGLang 0.5.23", "device": "cpu", "dtype": "float32", "drafter": "d" * 64, "exact": True,
    "speedup": [{"in_flight": 1, "plain_tokens_per_s": 10.0, "drafted_tokens_per_s": 14.0, "factor": 1.4}],
}  # fmt: skip
LOWER = FACTS | {"exact": False, "dtype": "bfloat16"}


def row(task: str = "a", tokens: int = 20, calls: int = 10, **served: Any) -> dict[str, Any]:
    """A prompt's row; `served` is what the engine did otherwise."""
    return {
        "id": "p", "task": task, "tokens": tokens, "calls": calls, "proposed": [calls, 5], "accepted": [5, 2],
        "lossless": True, "near_tie": False, "looping": False, "seen_ngrams": 0, "ngrams": 4, "answer_tokens": tokens + 1,
        "served": {
            "tokens": tokens, "calls": calls, "by_right": [1, calls - 1], "lossless": True, "near_tie": False, **served,
        },
    }  # fmt: skip


def report(*rows: dict[str, Any], facts: dict[str, Any] = FACTS, **gate: Any) -> dict[str, Any]:
    return combine(rows, Evaluation(prompts=(DatasetSpec(uri="/p"),), gate=Gate(**gate)), servings=[facts])


def test_a_kept_promise_passes_and_shows_both_lengths_in_one_shape() -> None:
    made = report(row("a", 30, 10), row("b", 20, 10))

    assert (made["verdict"], made["reasons"]) == ("pass", [])
    assert made["acceptance_length_served"] == made["acceptance_length"]
    assert made["acceptance_length_served"]["by_task"]["a"]["mean"] == 3.0
    assert made["serving"]["verify_calls"] == made["verify_calls"] == 20
    assert made["serving"]["calls_by_right_drafts"] == [2, 18]
    assert made["serving"]["speedup"] == FACTS["speedup"]


def test_in_float32_one_verify_call_more_on_one_prompt_fails_and_names_both_sides() -> None:
    other = row(tokens=2000, calls=1000)
    other["served"]["calls"] = 1001
    made = report(row(tokens=2000, calls=1000), other)

    assert made["verdict"] == "fail"
    assert made["reasons"] == [
        "the chain decoder promises an acceptance length of 2.0, SGLang 0.5.23 delivers 1.999: in float32 every prompt must "
        "take the same verify calls for the same tokens, and 1 of 2 took others (2000 promised, 2001 served in all)"
    ]


def test_in_float32_other_tokens_with_as_many_calls_fail_too() -> None:
    other = row()
    other["served"]["tokens"] = 19

    assert "1 of 1 took others" in report(other)["reasons"][0]


@pytest.mark.parametrize(("served_calls", "verdict"), [(1030, "pass"), (971, "pass"), (1032, "fail"), (970, "fail")])
def test_in_lower_precision_the_lengths_may_lie_three_percent_apart(served_calls: int, verdict: str) -> None:
    rows = row(tokens=2000, calls=1000)
    rows["served"]["calls"] = served_calls

    made = report(rows, facts=LOWER)

    assert made["verdict"] == verdict
    if verdict == "fail":
        assert "apart, 3.0% may lie between them" in made["reasons"][0]
        assert "promises an acceptance length of 2.0, SGLang 0.5.23 delivers" in made["reasons"][0]


def test_how_far_apart_they_may_lie_is_the_jobs_to_say() -> None:
    rows = row(tokens=2000, calls=1000)
    rows["served"]["calls"] = 1010

    assert report(rows, facts=LOWER, max_served_gap=0.0)["verdict"] == "fail"


def test_an_engine_that_answers_otherwise_with_the_drafter_fails() -> None:
    made = report(row(lossless=False))

    assert made["reasons"] == ["SGLang 0.5.23 answers otherwise with the drafter than without it"]
    assert made["serving"]["lossless"] is False


def test_without_an_engine_there_is_nothing_to_compare() -> None:
    bare = {name: value for name, value in row().items() if name != "served"}

    made = combine([bare], Evaluation(prompts=(DatasetSpec(uri="/p"),)))

    assert (made["verdict"], made["acceptance_length_served"], made["serving"]) == ("pass", None, None)


def job(**gate: Any) -> JobSpec:
    return parse_job(
        {"name": "n", "verifier": {"model": "/m", "backend": "sglang"}, "datasets": [{"uri": "/d"}],
         "evaluation": {"prompts": [{"uri": "/p"}], "gate": gate}}
    )  # fmt: skip


def test_units_are_put_together_and_the_speed_is_that_of_the_one_that_took_it() -> None:
    units = [
        {"rows": [row()], "costs": {}, "serving": FACTS},
        {"rows": [row("b")], "costs": {}, "serving": FACTS | {"speedup": [], "engine": "SGLang 0.5.24"}},
    ]

    made = reduce("evaluate", job(), units)

    assert made["serving"]["speedup"] == FACTS["speedup"]
    assert made["serving"]["engine"] == "SGLang 0.5.23, SGLang 0.5.24"
    assert made["acceptance_length_served"]["by_task"].keys() == {"a", "b"}


@pytest.mark.parametrize(("device", "warnings"), [("cuda", 1), ("cpu", 0)])
def test_serving_that_gets_slower_on_a_gpu_is_warned_of_with_both_rates(device: str, warnings: int) -> None:
    slower = {"in_flight": 16, "plain_tokens_per_s": 900.0, "drafted_tokens_per_s": 800.0, "factor": 0.89}
    facts = FACTS | {"device": device, "speedup": [*FACTS["speedup"], slower]}

    said = reduce("evaluate", job(), [{"rows": [row()], "costs": {}, "serving": facts}]).get("warnings", [])

    assert len(said) == warnings
    assert all("at 16 requests in flight: 800 tokens/s, 900 without it" in text for text in said)
