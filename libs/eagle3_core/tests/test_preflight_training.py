"""What would end a training when all states have been captured is refused when the job is posted."""

import pytest

from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.spec import parse_job
from eagle3_core.testing import tiny_job
from eagle3_core.train.memory import BatchTooSmall


def test_a_pass_that_is_shorter_than_a_sample_may_be_is_refused_and_one_that_cuts_samples_is_not(tmp_path):
    document = tiny_job(tmp_path)
    document["training"]["batch_tokens"] = 95

    with pytest.raises(BatchTooSmall, match=r"samples may have 96 tokens, training\.batch_tokens is 95") as caught:
        preflight(parse_job(document), [tmp_path])

    assert caught.value.pointer == "/training/batch_tokens"
    assert "set training.max_seq_len to 95" in caught.value.remedy
    document["training"]["max_seq_len"] = 95
    assert preflight(parse_job(document), [tmp_path]).train_peak_bytes


def test_no_sample_is_longer_than_the_positions_that_the_verifier_knows(tmp_path):
    document = tiny_job(tmp_path)
    document["data"]["max_seq_len"] = 1 << 20
    document["training"]["batch_tokens"] = 2048

    assert preflight(parse_job(document), [tmp_path]).train_peak_bytes
