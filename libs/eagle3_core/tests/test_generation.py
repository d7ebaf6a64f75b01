"""Batched greedy answers over the slot cache, against transformers' own generation and states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3_core.jobs.spec import VerifierSpec
from eagle3_core.testing import tiny_verifier
from eagle3_core.verifier.base import Decoding, Generated
from eagle3_core.verifier.generation import common_prefix
from eagle3_core.verifier.transformers import TransformersVerifier

torch.set_num_threads(1)  # tiny products: a second thread only waits, and waits long on a busy machine

NEW = 14
PREFIX = [5, 9, 17]
PROMPTS = [
    [*PREFIX, *tail]
    for tail in (
        [30],
        [41, 42, 43, 44, 45, 46],
        [60, 61],
        [70, 71, 72],
        [30],
        [81, 82, 83, 84, 85, 86, 87, 88],
        [90, 91],
    )
]


def quiet(*, done: int, tokens: int) -> None:
    """Report nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("model") / "verifier", seed=3)


@pytest.fixture(scope="module")
def verifier(folder: Path) -> TransformersVerifier:
    return TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def answers(verifier: TransformersVerifier, prompts: list[list[int]], **changes: object) -> list[Generated]:
    how = Decoding(**{"max_new_tokens": NEW, "batch_size": 3, "eos_ids": (), "keep_states": True, **changes})
    return sorted(verifier.generate(prompts, how, quiet), key=lambda g: g.index)


def plain(reference: AutoModelForCausalLM, prompt: list[int], new: int = NEW) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(new):
            ids = torch.cat([ids, reference(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[0].tolist()


def test_answers_of_a_ragged_refilled_batch_are_those_of_one_prompt_at_a_time(verifier, reference):
    want = [plain(reference, prompt) for prompt in PROMPTS]

    have = answers(verifier, PROMPTS)

    assert [a.ids for a in have] == want
    assert [a.prompt_len for a in have] == [len(p) for p in PROMPTS]
    assert not any(a.ended for a in have)


def test_every_token_has_the_state_that_the_model_reports_for_it(verifier, reference):
    for answer in answers(verifier, PROMPTS):
        with torch.no_grad():
            told = reference(torch.tensor([answer.ids]), output_hidden_states=True).hidden_states
        assert answer.states is not None
        aux = torch.cat([told[layer][0] for layer in verifier.aux_layers], -1)
        torch.testing.assert_close(answer.states.aux.float(), aux, rtol=1e-2, atol=1e-3)
        normed = reference.model.norm(answer.states.final.float())
        torch.testing.assert_close(normed, told[-1][0], rtol=2e-2, atol=2e-2)
        assert len(answer.states.aux) == len(answer.states.final) == len(answer.ids)


def test_logits_recomputed_from_final_states_give_the_token_that_came_next(verifier, reference):
    for answer in answers(verifier, PROMPTS):
        assert answer.states is not None
        states = answer.states.final[answer.prompt_len - 1 : -1].float()
        assert reference.lm_head(reference.model.norm(states)).argmax(-1).tolist() == answer.ids[answer.prompt_len :]


def test_an_end_token_is_part_of_the_answer_has_a_state_and_nothing_follows_it(verifier, reference):
    free = [plain(reference, prompt) for prompt in PROMPTS]
    eos = free[1][len(PROMPTS[1]) + 4]

    for full, answer in zip(free, answers(verifier, PROMPTS, eos_ids=(eos,)), strict=True):
        rest = full[answer.prompt_len :]
        stop = rest.index(eos) + 1 if eos in rest else len(rest)
        assert answer.ids == full[: answer.prompt_len + stop]
        assert answer.ended == (eos in rest)
        assert answer.states is not None
        assert len(answer.states.aux) == len(answer.ids)


def test_states_of_the_decoding_pass_are_those_of_a_prefill_of_the_same_tokens(verifier):
    decoded = answers(verifier, PROMPTS)

    captured = {c.index: c for c in verifier.capture([a.ids for a in decoded], batch_tokens=40, on_progress=quiet)}

    for answer in decoded:
        assert answer.states is not None
        torch.testing.assert_close(captured[answer.index].states.aux, answer.states.aux, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(captured[answer.index].states.final, answer.states.final, rtol=1e-2, atol=1e-3)


def test_the_longest_sample_bounds_prompt_and_answer_together(verifier):
    have = answers(verifier, PROMPTS, max_seq_len=10)

    assert [len(a.ids) for a in have] == [max(10, len(p) + 1) for p in PROMPTS]


def test_without_states_the_answers_are_the_same(verifier):
    kept = answers(verifier, PROMPTS, eos_ids=(7,))

    bare = answers(verifier, PROMPTS, eos_ids=(7,), keep_states=False)

    assert [a.ids for a in bare] == [a.ids for a in kept]
    assert all(a.states is None for a in bare)


def test_the_same_unit_gives_the_same_bits(verifier):
    first, second = answers(verifier, PROMPTS), answers(verifier, PROMPTS)

    for a, b in zip(first, second, strict=True):
        assert a.states is not None
        assert b.states is not None
        assert torch.equal(a.states.aux, b.states.aux)


def test_progress_counts_answers_and_may_stop_the_work(verifier):
    seen: list[int] = []

    def stop(*, done: int, tokens: int) -> None:
        seen.append(done)
        if done >= 3:
            raise KeyboardInterrupt

    how = Decoding(max_new_tokens=4, batch_size=3, eos_ids=())
    with pytest.raises(KeyboardInterrupt):
        list(verifier.generate(PROMPTS, how, stop))
    assert seen == sorted(seen)
    assert seen[-1] >= 3


def test_no_prompts_give_no_answers(verifier):
    assert answers(verifier, []) == []


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [([[1, 2, 3], [1, 2, 4]], 2), ([[1, 2]], 1), ([[1, 2], [1, 2]], 1), ([[1, 2], [1, 2, 3]], 1), ([[1], [1, 2]], 0), ([[3], [4]], 0)],
)  # fmt: skip
def test_a_shared_prefix_leaves_a_token_to_every_prompt(prompts, shared):
    assert common_prefix(prompts) == shared
