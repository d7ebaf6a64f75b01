"""States are asked what they would have said: those of another layer, place or prompt say something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3_core.drafter.verifier_parts import VerifierParts
from eagle3_core.jobs.spec import VerifierSpec
from eagle3_core.testing import tiny_verifier
from eagle3_core.verifier.base import Decoding, Generated, States
from eagle3_core.verifier.recheck import MOST, Recheck, StatesDisagree
from eagle3_core.verifier.transformers import TransformersVerifier

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("verifier") / "tiny")


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[Generated]:
    """Greedy answers with the states, in float32, of their own pass."""
    verifier = TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype="float32", device="cpu"))
    how = Decoding(max_new_tokens=12, batch_size=4, eos_ids=(), keep_states=True)
    return list(verifier.generate([[1, 9, 30 + i, 40] for i in range(6)], how, lambda **said: None))


def mask(answer: Generated) -> list[int]:
    return [0] * answer.prompt_len + [1] * (len(answer.ids) - answer.prompt_len)


def rechecked(answers: list[Generated], shift: int = 0) -> Recheck:
    recheck = Recheck(len(answers))
    for answer in answers:
        assert answer.states is not None
        final = answer.states.final.roll(shift, 0)
        recheck.add(f"s{answer.index}", answer.ids, mask(answer), States(answer.states.aux, final), None)
    return recheck


def test_states_of_the_answers_own_pass_give_every_token_of_it(folder: Path, answers: list[Generated]) -> None:
    # stored states are bfloat16, so tokens that are nearly tied may change places: a gap as a bfloat16 verifier has
    assert rechecked(answers).judge(VerifierParts(folder), 0.05) == {"checked": 72, "agreed": 72}


def test_states_of_another_place_are_refused_with_the_first_token_that_differs(
    folder: Path, answers: list[Generated]
) -> None:
    with pytest.raises(
        StatesDisagree, match=r"of 72 checked positions .* first at position \d+ of sample s\d: "
    ) as refused:
        rechecked(answers, shift=1).judge(VerifierParts(folder), 0.05)

    assert refused.value.context["wrong"] > 36


def test_what_the_engine_said_comes_next_is_checked_where_answers_are_other_peoples(
    folder: Path, answers: list[Generated]
) -> None:
    recheck = Recheck(len(answers))
    for answer in answers:
        assert answer.states is not None
        states = States(answer.states.aux[:-1], answer.states.final[:-1])
        recheck.add("s", answer.ids[:-1], [], states, answer.ids[-1])

    assert recheck.judge(VerifierParts(folder), 0.05) == {"checked": 6, "agreed": 6}


def test_one_token_in_a_hundred_may_differ_and_no_more(folder: Path, answers: list[Generated]) -> None:
    def judged(wrong: int, of: int) -> dict[str, int]:
        recheck = Recheck(1)
        for n in range(of):
            answer = answers[n % len(answers)]
            assert answer.states is not None
            token = answer.ids[5] if n >= wrong else (answer.ids[5] + 1) % 320
            recheck.add("s", answer.ids[:5], [], States(answer.states.aux[:5], answer.states.final[:5]), token)
        return recheck.judge(VerifierParts(folder), 0.05)

    assert judged(2, 200) == {"checked": 200, "agreed": 198}
    with pytest.raises(StatesDisagree, match="at 3 of 200"):
        judged(3, 200)


def test_a_unit_of_many_samples_is_not_checked_everywhere(answers: list[Generated]) -> None:
    recheck = Recheck(200)
    for n in range(200):
        answer = answers[n % len(answers)]
        assert answer.states is not None
        recheck.add(f"s{n}", answer.ids, mask(answer), answer.states, 7)

    assert len(recheck._tokens) <= MOST


def test_no_samples_are_no_disagreement(folder: Path) -> None:
    assert Recheck(0).judge(VerifierParts(folder), 0) == {"checked": 0, "agreed": 0}
