"""A job that SGLang would not take is refused when it is posted, before a server is started for it."""

from pathlib import Path
from typing import Any

import pytest

from eagle3_core.errors import AerieError
from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.spec import parse_job
from eagle3_core.testing import tiny_job


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path


@pytest.fixture
def job(folder) -> dict[str, Any]:
    return tiny_job(folder)


def refusal(job: dict[str, Any], folder: Path) -> AerieError:
    with pytest.raises(AerieError) as caught:
        preflight(parse_job(job), [folder])
    assert caught.value.remedy
    return caught.value


def said(error: AerieError) -> tuple[str, str | None]:
    return error.code, error.pointer


@pytest.mark.parametrize(
    ("engine", "max_seq_len", "says"),
    [
        ({}, 2042, "samples may have 2042 tokens, and SGLang takes prompts of at most 2041 with a verifier of 2048"),
        ({}, 9999, "samples may have 2048 tokens"),
        ({"kv_cache_tokens": 96}, 90, "at most 89 with a KV cache of 96 tokens"),
    ],
)
def test_samples_that_the_engine_would_not_take_are_refused_before_it_is_started(
    folder, job, engine, max_seq_len, says
):
    job["verifier"] |= {"backend": "sglang", "engine": engine}
    job["data"]["max_seq_len"] = max_seq_len

    error = refusal(job, folder)

    assert said(error) == ("engine.length", "/data/max_seq_len")
    assert says in error.detail


def test_layers_that_the_verifier_does_not_have_are_refused_on_any_engine(folder, job):
    job["extraction"] = {"aux_layers": [1, 4, 8]}

    assert said(refusal(job, folder)) == ("verifier.layers", "/extraction/aux_layers")


def test_layers_that_the_engine_cannot_be_told_to_read_are_refused(folder, job):
    job["verifier"] |= {"backend": "sglang"}
    job["extraction"] = {"aux_layers": [0, 3, 5]}

    assert said(refusal(job, folder)) == ("verifier.layers", "/extraction/aux_layers")


def test_a_job_on_the_engine_that_fits_is_fine(folder, job):
    job["verifier"] |= {"backend": "sglang", "engine": {"kv_cache_tokens": 4096}}

    assert preflight(parse_job(job), [folder]).aux_layers == (2, 4, 5)
