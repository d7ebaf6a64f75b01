"""Prepare reads what the job was posted with, or nothing: a source that changed since is refused by name."""

from typing import Any

from preparing import context, refusal

from eagle3_core.data.corpus import training_samples
from eagle3_core.testing import tiny_conversations, tiny_job, tiny_verifier, write_jsonl


def test_a_data_set_that_changed_since_the_job_was_posted_is_refused(tmp_path):
    ctx = context(tmp_path, tiny_job(tmp_path))
    write_jsonl(tmp_path / "train.jsonl", tiny_conversations(3))

    error = refusal(ctx)

    assert (error.code, error.pointer, error.status) == ("dataset.changed", "/datasets/0/uri", 409)


def test_a_data_set_that_vanished_is_missing(tmp_path):
    ctx = context(tmp_path, tiny_job(tmp_path))
    (tmp_path / "eval.jsonl").unlink()

    error = refusal(ctx)

    assert (error.code, error.pointer) == ("dataset.missing", "/evaluation/prompts/0/uri")


def test_a_data_set_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    ctx = context(tmp_path, tiny_job(tmp_path))

    def change(*args: Any) -> Any:
        write_jsonl(tmp_path / "train.jsonl", tiny_conversations(3))
        return training_samples(*args)

    monkeypatch.setattr("eagle3_core.stages.prepare.training_samples", change)

    error = refusal(ctx)

    assert (error.code, error.pointer) == ("dataset.changed", "/datasets/0/uri")


def test_a_verifier_that_changed_since_the_job_was_posted_is_refused(tmp_path):
    ctx = context(tmp_path, tiny_job(tmp_path))
    tiny_verifier(tmp_path / "verifier", seed=1)

    error = refusal(ctx)

    assert (error.code, error.pointer) == ("verifier.changed", "/verifier/model")
