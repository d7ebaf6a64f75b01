"""The test kit's verifier is a checkpoint like any other: lossless text, the same bytes everywhere, loadable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.testing import stage_context, tiny_job, tiny_tokenizer, tiny_verifier
from eagle3_core.verifier.identity import inspect

TOKENIZER = tiny_tokenizer(272)


@given(st.text())
def test_text_survives_the_tiny_tokenizer(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids

    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("vocab", [128, 272, 320, 512])
def test_no_token_lies_beyond_the_vocabulary(vocab):
    assert max(tiny_tokenizer(vocab).get_vocab().values()) < vocab


def test_a_vocabulary_without_room_for_letters_is_refused():
    with pytest.raises(ValueError, match="128"):
        tiny_tokenizer(64)


def test_two_tiny_verifiers_are_one_and_the_same(tmp_path):
    assert inspect(tiny_verifier(tmp_path / "a")).digest == inspect(tiny_verifier(tmp_path / "b")).digest


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_it_without_a_missing_or_a_spare_tensor(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    folder = tiny_verifier(tmp_path / "v", tie_word_embeddings=tied)

    _, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)

    assert {name: list(found) for name, found in loading.items() if found} == {}


def test_a_curve_holds_numbers_and_what_is_none_goes_to_the_log(tmp_path):
    ctx = stage_context(tmp_path, "train", tiny_job(tmp_path))

    ctx.metric("grad_norm", float("nan"), 3)
    ctx.metric("grad_norm", 2.0, 4)

    assert [(m.value, m.step) for m in ctx.reporter.metrics] == [(2.0, 4)]
    assert ctx.reporter.lines[-1].text == "grad_norm is nan at step 3"
