"""What preflight reads of a job's sources, and how often."""

from pathlib import Path
from typing import Any

import pytest

from eagle3_core.digests import digest_file
from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.spec import parse_job
from eagle3_core.testing import tiny_job


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path


@pytest.fixture
def job(folder) -> dict[str, Any]:
    return tiny_job(folder)


def test_a_file_that_is_named_twice_is_digested_once(folder, job, monkeypatch):
    asked = []
    monkeypatch.setattr("eagle3_core.jobs.preflight.fingerprint", lambda path: asked.append(path) or digest_file(path))
    job["datasets"] = [{"uri": str(folder / "train.jsonl")}, {"uri": (folder / "train.jsonl").as_uri()}]

    checked = preflight(parse_job(job), [folder])

    assert asked == [folder / "train.jsonl", folder / "eval.jsonl"]
    assert len(checked.sources) == 4
