"""Keys say when a result can be reused: same inputs and configuration, same key; anything that matters changes it."""

from typing import Any

import pytest

from eagle3_core.jobs.graph import STAGES, Slice, slices, stages_of, unit_inputs, unit_key
from eagle3_core.jobs.spec import JobSpec, parse_job

SOURCES = {"verifier": "v1", "train.jsonl": "d1", "test.jsonl": "d2"}
WHOLE = Slice(0, 0, 1)


def spec(**sections: Any) -> JobSpec:
    return parse_job(
        {
            "name": "drafter",
            "verifier": {"model": "/models/v"},
            "datasets": [{"uri": "train.jsonl"}],
            "evaluation": {"prompts": [{"uri": "test.jsonl"}], **sections.pop("evaluation", {})},
            **sections,
        }
    )


def key(stage: Any, job: JobSpec, inputs: dict[str, list[str]] | None = None, tenant: str = "t", **sources: str) -> str:
    return unit_key(stage, job, WHOLE, inputs or {}, {**SOURCES, **sources}, tenant)


def test_stages_run_in_the_order_in_which_they_read_each_other():
    seen: set[str] = set()
    for stage in STAGES.values():
        assert set(stage.reads) <= seen
        seen.add(stage.name)


def test_without_regeneration_there_is_no_generate_stage():
    assert "generate" not in [s.name for s in stages_of(spec(data={"regenerate": {"enabled": False}}))]


def test_more_epochs_change_training_and_nothing_before_it():
    few, many = spec(training={"epochs": 1}), spec(training={"epochs": 2})

    changed = [name for name in STAGES if key(name, few) != key(name, many)]

    assert changed == ["train", "package"]


def test_other_aux_layers_extract_again_and_never_regenerate():
    one, other = spec(extraction={"aux_layers": [2, 4, 5]}), spec(extraction={"aux_layers": [1, 4, 5]})

    assert key("generate", one) == key("generate", other)
    assert key("extract", one) != key("extract", other)


def test_the_place_of_a_verifier_does_not_matter_its_content_does():
    here, there = spec(), spec(verifier={"model": "/elsewhere/v"})

    assert key("generate", here) == key("generate", there)
    assert key("generate", here) != key("generate", here, verifier="v2")


@pytest.mark.parametrize("stage", list(STAGES))
def test_tenants_never_share_keys(stage: Any):
    assert key(stage, spec(), tenant="a") != key(stage, spec(), tenant="b")


def test_a_changed_dataset_changes_prepare():
    assert key("prepare", spec()) != key("prepare", spec(), **{"train.jsonl": "d9"})


def test_inputs_reach_the_key():
    assert key("train", spec(), {"extract": ["a"]}) != key("train", spec(), {"extract": ["b"]})


def test_the_gate_decides_at_the_end_and_never_reruns_the_measurement():
    lax, strict = spec(), spec(evaluation={"gate": {"min_mean": 3.0}})

    assert key("evaluate", lax) == key("evaluate", strict)
    assert key("package", lax) != key("package", strict)


def test_what_cuts_the_answers_that_are_measured_measures_anew_and_captures_nothing_anew():
    one, other = (
        spec(verifier={"model": "/models/v", "backend": "sglang", "engine": {"kv_cache_tokens": tokens}})
        for tokens in (4096, 512)
    )

    assert key("evaluate", one) != key("evaluate", other)
    assert [key(stage, one) == key(stage, other) for stage in ("generate", "extract", "train")] == [True] * 3


def test_slices_cover_every_sample_once():
    job = spec(data={"unit_samples": 100})

    parts = slices("generate", job, {"samples": 250, "eval_prompts": 1})

    assert [(p.start, p.stop) for p in parts] == [(0, 100), (100, 200), (200, 250)]


def test_the_key_of_a_slices_states_depends_on_no_other_slice():
    inputs = unit_inputs("extract", spec(), 1, {"prepare": ["p"], "generate": ["g0", "g1"]})

    assert inputs == {"generate": ["g1"]}


def test_a_card_that_names_the_drafter_and_its_verifier_is_made_anew_for_another_name_or_place():
    one = spec()

    assert key("package", one) != key("package", one.model_copy(update={"name": "other"}))
    assert key("package", one) != key("package", spec(verifier={"model": "/elsewhere/v"}))


@pytest.mark.parametrize("stage", list(STAGES))
def test_another_verifier_changes_every_stage(stage: Any):
    assert key(stage, spec()) != key(stage, spec(verifier={"model": "/models/w"}), verifier="v2")


def test_the_device_of_training_is_part_of_its_key_since_it_decides_the_bits():
    assert key("train", spec(verifier={"model": "/v", "device": "cpu"})) != key(
        "train", spec(verifier={"model": "/v", "device": "cuda"})
    )


@pytest.mark.parametrize("stage", ["generate", "extract", "evaluate"])
def test_threads_that_a_job_names_for_a_stage_are_part_of_its_key_and_of_no_others(stage: Any):
    one, two = spec(resources={stage: {"threads": 1}}), spec(resources={stage: {"threads": 2}})

    assert [name for name in STAGES if key(name, one) != key(name, two)] == [stage]
    assert [name for name in STAGES if key(name, one) != key(name, spec())] == [stage]


def test_how_often_training_saves_does_not_matter():
    assert key("train", spec(training={"checkpoint_every_steps": 5})) == key("train", spec())
