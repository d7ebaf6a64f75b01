"""A job that may start and is only unwise gets a warning that says why."""

from pathlib import Path
from typing import Any

import pytest

from eagle3_core.data.samples import HeldOutOverlap
from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.spec import parse_job
from eagle3_core.testing import tiny_job


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path


@pytest.fixture
def job(folder) -> dict[str, Any]:
    return tiny_job(folder, held_out=20)


@pytest.mark.parametrize(
    ("section", "field", "value", "says"),
    [
        ("data", "max_seq_len", 4096, "2048 positions"),
        ("evaluation", "num_steps", 5, "drafts deeper"),
    ],
)
def test_what_is_only_unwise_is_a_warning(folder, job, section, field, value, says):
    job[section][field] = value
    job["training"]["max_seq_len"] = 96

    (warning,) = preflight(parse_job(job), [folder]).warnings

    assert says in warning


def test_no_tie_allowed_in_low_precision_is_a_warning(folder, job):
    job["verifier"]["dtype"] = "bfloat16"
    assert not preflight(parse_job(job), [folder]).warnings
    job["evaluation"]["near_tie_logit_gap"] = 0

    (warning,) = preflight(parse_job(job), [folder]).warnings

    assert "near_tie_logit_gap" in warning


def test_answers_that_cannot_fit_are_a_warning(folder, job):
    job["data"]["regenerate"]["max_new_tokens"] = 96

    assert "do not fit" in preflight(parse_job(job), [folder]).warnings[0]


def test_a_few_broken_lines_are_a_warning(folder, job):
    job["data"]["bad_rows_limit"] = 0.5
    with (folder / "train.jsonl").open("a") as file:
        file.write("{\n")

    assert "1 of the first 13 lines" in preflight(parse_job(job), [folder]).warnings[0]


def test_few_held_out_prompts_are_said_before_anything_runs(folder, job):
    job["evaluation"]["max_prompts"] = 19

    (warning,) = preflight(parse_job(job), [folder]).warnings

    assert warning.startswith("19 held-out prompts are few")
    job["evaluation"]["max_prompts"] = 20
    assert preflight(parse_job(job), [folder]).warnings == ()


def test_equal_held_out_prompts_are_few_however_many_there_are(folder, job):
    line = (folder / "eval.jsonl").read_text().splitlines()[0]
    (folder / "eval.jsonl").write_text(f"{line}\n" * 60)

    (warning,) = preflight(parse_job(job), [folder]).warnings

    assert warning.startswith("1 held-out prompt is few")


def test_a_val_ratio_that_leaves_nothing_to_train_on_is_refused(folder, job):
    job["data"]["val_ratio"] = 0.999999

    with pytest.raises(HeldOutOverlap, match="holds out all 12 training conversations") as caught:
        preflight(parse_job(job), [folder])

    assert caught.value.pointer == "/data/val_ratio"
