"""The report and the gate: sums by hand, an interval that is reproducible, and a reason for every verdict."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.evaluate.gate import decide
from eagle3_core.evaluate.lengths import acceptance_length
from eagle3_core.evaluate.ngrams import SeenNgrams, loops
from eagle3_core.evaluate.report import combine, predicted_speedup
from eagle3_core.jobs.results import reduce
from eagle3_core.jobs.spec import DatasetSpec, Evaluation, Gate, parse_job


def row(task: str = "a", tokens: int = 20, calls: int = 10, **changes: object) -> dict:
    counts = {"proposed": [calls, calls // 2], "accepted": [calls // 2, calls // 5]}
    flags = {
        "lossless": True,
        "near_tie": False,
        "looping": False,
        "seen_ngrams": 1,
        "ngrams": 4,
        "answer_tokens": tokens + 1,
    }
    return {"id": "p", "task": task, "tokens": tokens, "calls": calls, **counts, **flags, **changes}


def evaluation(**gate: object) -> Evaluation:
    return Evaluation(prompts=(DatasetSpec(uri="/p.jsonl"),), gate=Gate(**gate))


def test_mean_pools_over_tokens_and_macro_over_tasks():
    report = combine([row("a", 30, 10), row("a", 30, 10), row("b", 10, 10)], evaluation())

    length = report["acceptance_length"]
    assert length["mean"] == round(70 / 30, 4)
    assert length["macro"] == 2.0
    assert {name: (t["mean"], t["prompts"]) for name, t in length["by_task"].items()} == {"a": (3.0, 2), "b": (1.0, 1)}
    assert report["prompts"] == 3
    assert report["acceptance_by_position"] == [0.5, 0.4]


def test_the_interval_is_the_same_every_time_and_covers_the_mean():
    rows = [row(tokens=10 + i, calls=10) for i in range(20)]

    first, second = acceptance_length(rows), acceptance_length(rows)

    assert first == second
    assert first["ci_low"] < first["mean"] < first["ci_high"]


@given(counts=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 100)), min_size=1, max_size=30))
def test_the_interval_lies_between_the_worst_and_the_best_prompt(counts):
    got = acceptance_length([row(tokens=t, calls=c) for t, c in counts])

    each = [t / c for t, c in counts]
    assert min(each) - 1e-4 <= got["ci_low"] <= got["ci_high"] <= max(each) + 1e-4
    assert min(each) - 1e-4 <= got["mean"] <= max(each) + 1e-4


def test_prompts_that_made_no_verify_call_weigh_nothing():
    assert acceptance_length([row(), row(tokens=0, calls=0)]) == acceptance_length([row()])


def test_the_order_of_units_does_not_change_the_report():
    rows = [row("a", 30, 10), row("b", 12, 11), row("c", 5, 5)]

    means = {combine(list(order), evaluation())["acceptance_length"]["mean"] for order in itertools.permutations(rows)}

    assert len(means) == 1


def test_nothing_measured_fails_and_says_so():
    report = combine([row(tokens=0, calls=0)], evaluation())

    assert report["verdict"] == "fail"
    assert any("nothing was measured" in reason for reason in report["reasons"])
    assert combine([], evaluation())["verdict"] == "fail"


@pytest.mark.parametrize(
    ("gate", "changes", "reason"),
    [
        ({"min_ci_low": 2.0}, {}, "interval starts at 2.0, it must lie above 2.0"),
        ({"min_mean": 2.5}, {}, "acceptance length 2.0 is below 2.5"),
        ({"min_macro": 2.5}, {}, "over tasks 2.0 is below 2.5"),
        ({"min_task": 2.1}, {}, "of task a is below 2.1"),
        ({}, {"lossless": False}, "differ from the verifier's own"),
        ({"max_looping_share": 0.2}, {"looping": True}, "100% of the answers loop, 20% may"),
    ],
)
def test_every_threshold_fails_with_its_own_reason(gate, changes, reason):
    report = combine([row(**changes)] * 3, evaluation(**gate))

    assert report["verdict"] == "fail"
    assert len(report["reasons"]) == 1
    assert reason in report["reasons"][0]


COSTS = {"verify_1_ms": 10.0, "verify_chain_ms": 12.0, "draft_ms": 13.0, "device": "cuda", "threads": 1}
SERVED = {"speedup": [{"in_flight": 1, "factor": 1.5}, {"in_flight": 16, "factor": 0.9}]}


@pytest.mark.parametrize(
    ("serving", "reasons"),
    [
        (None, ["the speed-up predicted at batch 1 is 0.80, below 1"]),
        (SERVED | {"device": "cpu"}, ["the speed-up predicted at batch 1 is 0.80, below 1"]),
        (SERVED | {"device": "cuda"}, ["measured with 16 requests in flight, the speed-up is 0.90, below 1"]),
    ],
)
def test_a_drafter_that_would_make_serving_slower_fails_where_the_job_asks_for_speed(serving, reasons):
    report = combine([row()] * 3, evaluation(), costs=[COSTS]) | {"serving": serving}

    assert decide(report, Gate())[0] == "pass"
    assert decide(report, Gate(min_speedup=1)) == ("fail", reasons)
    assert decide(report, Gate(min_speedup=0.5)) == ("pass", [])


def test_a_speed_that_nobody_measured_is_no_speed():
    report = combine([row()] * 3, evaluation(min_speedup=1))

    assert (report["verdict"], len(report["reasons"])) == ("fail", 1)


def test_a_drafter_that_meets_every_threshold_passes():
    gate = Gate(min_mean=2.0, min_ci_low=1.9, min_macro=2.0, min_task=2.0, max_looping_share=0.0)

    assert decide(combine([row()] * 3, evaluation()), gate) == ("pass", [])


def test_differences_are_allowed_where_the_job_says_so():
    assert combine([row(lossless=False)] * 2, evaluation(require_lossless=False))["verdict"] == "pass"


def test_shares_are_of_prompts_and_of_ngrams():
    report = combine([row(near_tie=True, looping=True, seen_ngrams=3), row()], evaluation())

    assert (report["near_tie_share"], report["looping_share"], report["seen_ngram_share"]) == (0.5, 0.5, 0.5)


def test_the_predicted_speedup_is_the_length_over_the_cost_of_a_round():
    cost = {"verify_1_ms": 40.0, "verify_chain_ms": 70.0, "draft_ms": 10.0, "device": "cpu", "threads": 1}

    predicted = predicted_speedup(2.1, [cost])

    assert predicted is not None
    assert predicted["factor"] == 1.05
    assert predicted["break_even_acceptance_length"] == 2.0
    assert predicted_speedup(2.1, []) is None


def test_an_answer_loops_when_eight_tokens_come_twice():
    eight = list(range(8))

    assert loops([*eight, *eight])
    assert loops([1] * 9)
    assert not loops([1] * 8)
    assert not loops(list(range(40)))


def test_seen_ngrams_are_counted_in_the_held_out_answer():
    seen = SeenNgrams()
    seen.add([list(range(20)), [5]])

    assert seen.count(list(range(3, 13))) == (3, 3)
    assert seen.count([*range(8), 99]) == (1, 2)
    assert seen.count([1, 2]) == (0, 0)


JOB = parse_job(
    {"name": "n", "verifier": {"model": "/m"}, "datasets": [{"uri": "/d"}], "evaluation": {"prompts": [{"uri": "/p"}]}}
)


def test_units_of_generate_and_extract_are_summed():
    generated = reduce(
        "generate", JOB, [{"samples": 3, "ended": 3, "looping": 0}, {"samples": 1, "ended": 0, "looping": 1}]
    )
    extracted = reduce(
        "extract", JOB, [{"samples": 3, "bytes": 10, "pass": "decode"}, {"samples": 1, "bytes": 5, "pass": "prefill"}]
    )

    assert generated == {"samples": 4, "ended": 3, "looping": 1, "ended_share": 0.75, "looping_share": 0.25}
    assert extracted == {"samples": 4, "bytes": 15, "pass": "decode+prefill"}


def test_units_of_evaluate_become_one_report_and_other_stages_stay_as_they_are():
    report = reduce("evaluate", JOB, [{"rows": [row()], "costs": {}}, {"rows": [row("b")], "costs": {}}])

    assert report["prompts"] == 2
    assert report["predicted_speedup"] is None
    assert reduce("train", JOB, [{"loss": 1.0}]) == {"loss": 1.0}


def measured(*, looping: int, speed: float) -> list[str]:
    """The warnings about ten prompts of which `looping` loop, where drafting costs `speed` as little as it brings."""
    spec = parse_job(
        {"name": "n", "verifier": {"model": "/v"}, "datasets": [{"uri": "/t.jsonl"}],
         "evaluation": {"prompts": [{"uri": "/p.jsonl"}]}}
    )  # fmt: skip
    rows = [row(looping=i < looping) for i in range(10)]  # acceptance length 2
    costs = {"verify_1_ms": speed, "verify_chain_ms": 1.5, "draft_ms": 0.5, "device": "cpu", "threads": 1}
    return reduce("evaluate", spec, [{"rows": rows, "costs": costs}]).get("warnings", [])


def test_a_report_that_looping_flatters_or_that_predicts_a_loss_warns_with_its_figure_and_a_remedy():
    (loops_,) = measured(looping=3, speed=1.0)
    (slower,) = measured(looping=2, speed=0.9)

    assert loops_.startswith("30% of the answers loop")
    assert "evaluation.max_new_tokens" in loops_
    assert slower.startswith("the predicted speed-up at batch 1 is 0.90")
    assert "breaks even at an acceptance length of 2.22 and has 2.00" in slower
    assert measured(looping=2, speed=1.0) == []
