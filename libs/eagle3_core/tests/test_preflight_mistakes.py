"""All that is wrong with a job is said at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3_core.errors import AerieError
from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.spec import parse_job
from eagle3_core.testing import tiny_job, write_jsonl


@pytest.fixture
def job(tmp_path) -> dict[str, Any]:
    return tiny_job(tmp_path, held_out=20)


def faults(job: dict[str, Any], root: Path) -> list[tuple[str, str]]:
    with pytest.raises(AerieError) as caught:
        preflight(parse_job(job), [root])
    doc = caught.value.problem()
    assert (doc["code"], doc["detail"]) == (doc["errors"][0]["code"], doc["errors"][0]["detail"])
    assert all(fault["remedy"] for fault in doc["errors"])
    assert AerieError.from_problem(doc).problem()["errors"] == doc["errors"]
    return [(fault["code"], fault["pointer"]) for fault in doc["errors"]]


def test_every_missing_file_is_named(job, tmp_path):
    job["verifier"]["model"] = str(tmp_path / "no verifier")
    job["datasets"] = [{"uri": str(tmp_path / "no data")}, *job["datasets"], {"uri": "http://127.0.0.1/more.jsonl"}]
    job["evaluation"]["prompts"] = [{"uri": str(tmp_path / "no prompts")}]

    assert faults(job, tmp_path) == [
        ("verifier.missing", "/verifier/model"),
        ("source.scheme", "/datasets/2/uri"),
        ("dataset.missing", "/datasets/0/uri"),
        ("dataset.missing", "/evaluation/prompts/0/uri"),
    ]


def test_fields_that_do_not_suit_the_verifier_are_all_named_and_so_are_data_that_cannot_be_used(job, tmp_path):
    job["vocab"]["draft_vocab_size"] = 1
    job["training"]["batch_tokens"] = 64
    (tmp_path / "train.jsonl").write_text("no line of JSON\n")

    assert faults(job, tmp_path) == [
        ("vocab.size", "/vocab/draft_vocab_size"),
        ("training.batch_tokens", "/training/batch_tokens"),
        ("dataset.not_jsonl", "/datasets/0/uri"),
    ]


def test_prompts_that_make_no_sample_are_named_for_training_and_for_measuring(job, tmp_path):
    long = [{"messages": [{"role": "user", "content": "and " * 200}]} for _ in range(2)]
    write_jsonl(tmp_path / "train.jsonl", long)
    write_jsonl(tmp_path / "eval.jsonl", long)

    found = faults(job, tmp_path)

    assert [pointer for _, pointer in found] == ["/data/max_seq_len", "/data/max_seq_len"]


def test_one_mistake_is_told_as_it_always_was(job, tmp_path):
    job["datasets"].append({"uri": str(tmp_path / "no data")})

    with pytest.raises(AerieError) as caught:
        preflight(parse_job(job), [tmp_path])

    assert "faults" not in caught.value.context
    assert caught.value.pointer == "/datasets/1/uri"
