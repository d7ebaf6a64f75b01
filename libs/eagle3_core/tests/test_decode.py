"""The chain decoder: lossless whatever the drafter proposes, and counting exactly what serving would count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3_core.drafter.config import drafter_config, read_text_config
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.tensors import tensor_shapes
from eagle3_core.drafter.verifier_parts import VerifierParts
from eagle3_core.evaluate.costs import measure_costs
from eagle3_core.evaluate.decode import Chain, ChainDecoder, Measured, measure
from eagle3_core.evaluate.losslessness import compare
from eagle3_core.jobs.spec import VerifierSpec
from eagle3_core.testing import tiny_verifier
from eagle3_core.verifier.base import Decoding
from eagle3_core.verifier.generation import prefill
from eagle3_core.verifier.transformers import TransformersVerifier

torch.set_num_threads(1)  # tiny products: a second thread only waits, and waits long on a busy machine

NEW, VOCAB = 10, 6
PROMPTS = [[5, 9, 17, 3], [5, 9, 17, 4, 8, 8, 1, 3], [5, 9, 11]]


def quiet(*, done: int, tokens: int) -> None:
    """Report nothing."""


def model(folder: Path, dtype: str = "float32") -> TransformersVerifier:
    return TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype=dtype, device="cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier of few words: the smaller its vocabulary, the more often a random drafter is right."""
    return tiny_verifier(tmp_path_factory.mktemp("model") / "verifier", seed=5)


@pytest.fixture(scope="module")
def verifier(folder: Path) -> TransformersVerifier:
    verifier = model(folder)
    with torch.no_grad():  # only the first tokens can win, so that drafts are sometimes right
        verifier.parts.head.weight[VOCAB:] = 0
    return verifier


def random_drafter(folder: Path, seed: int, algorithm: str, in_vocab: list[int]) -> Drafter:
    """An untrained drafter that can propose the tokens `in_vocab`."""
    text = read_text_config(folder)
    config = drafter_config(
        text, algorithm=algorithm, aux_layers=(2, 4, 5), draft_vocab_size=len(in_vocab), ttt_steps=3
    )  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=draw) / shape[-1] ** 0.5
        for name, shape in tensor_shapes(config).items()
    }
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[in_vocab] = True
    d2t = torch.tensor(in_vocab) - torch.arange(len(in_vocab))
    return Drafter.assemble(config, weights, VerifierParts(folder).embedding(), d2t, t2d)


def replay(verifier: TransformersVerifier, drafter: Drafter, ids: list[int], prompt_len: int, steps: int):
    """Calls, tokens and hits on a recorded greedy text, drafting from scratch each round: no cache, no batch, no verifying."""
    pass_ = verifier.forward(torch.tensor([ids]), torch.arange(len(ids))[None], None, states=True)
    combined = drafter.combine(pass_.states.aux[0])
    known, calls, proposed, accepted = prompt_len + 1, 0, [0] * steps, [0] * steps
    while known < len(ids):
        calls += 1
        tokens, hidden, drafted = ids[1:known], combined[: known - 1], []
        for _ in range(steps):
            out = unrolled(drafter, tokens, hidden)
            drafted.append(int(drafter.tokens(drafter.logits(out[-1]).argmax(-1))))
            tokens, hidden = [*tokens, drafted[-1]], torch.cat([hidden, out[-1:]])
        for k in range(steps + 1):
            known += 1
            right = k < steps and drafted[k] == ids[known - 1]
            if k < steps:
                proposed[k] += 1
                accepted[k] += right
            if known == len(ids) or not right:
                break
    return calls, len(ids) - prompt_len - 1, proposed, accepted


def unrolled(drafter: Drafter, tokens: list[int], hidden: Tensor) -> Tensor:
    """The drafter's layer over all pairs at once, without a cache: [T, H]."""
    positions = torch.arange(1, len(tokens) + 1)
    pair = drafter.pair(torch.tensor(tokens), hidden)
    keys, values = drafter.keys_values(pair, positions)
    group = drafter.config.num_heads // drafter.config.num_kv_heads
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("tqd,sqd->qts", drafter.queries(pair, positions), keys) * drafter.config.head_dim**-0.5
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    return drafter.finish(torch.einsum("qts,sqd->tqd", weights, values), hidden)


def check_against_replay(
    verifier: TransformersVerifier, drafter: Drafter, measured: list[Measured], steps: int
) -> None:
    for one in measured:
        chain = one.chain
        assert chain.ids == one.plain.ids, "drafting changed the answer"
        calls, tokens, proposed, accepted = replay(verifier, drafter, one.plain.ids, chain.prompt_len, steps)
        assert (chain.calls, chain.tokens) == (calls, tokens)
        assert (chain.proposed, chain.accepted) == (proposed, accepted)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 999),
    steps=st.integers(1, 5),
    algorithm=st.sampled_from(["eagle3.1", "eagle3"]),
    batch=st.integers(1, 4),
    vocab=st.sets(st.integers(0, VOCAB - 1), min_size=1),
    eos=st.integers(0, 3 * VOCAB),
)
def test_any_drafter_is_lossless_and_counts_what_an_exact_replay_counts(
    verifier, folder, seed, steps, algorithm, batch, vocab, eos
):
    drafter = random_drafter(folder, seed, algorithm, sorted(vocab))
    how = Decoding(max_new_tokens=NEW, batch_size=batch, eos_ids=(eos,))

    measured = measure(verifier, drafter, PROMPTS, how, num_steps=steps, on_progress=quiet)

    assert [one.plain.index for one in measured] == list(range(len(PROMPTS)))
    check_against_replay(verifier, drafter, measured, steps)


def test_plain_answers_beside_the_drafted_ones_are_those_of_generate(verifier, folder):
    how = Decoding(max_new_tokens=NEW, batch_size=3, eos_ids=(7,))
    drafter = random_drafter(folder, 0, "eagle3.1", list(range(VOCAB)))

    measured = measure(verifier, drafter, PROMPTS, how, num_steps=3, on_progress=quiet)

    generated = sorted(verifier.generate(PROMPTS, how, quiet), key=lambda g: g.index)
    assert [one.plain.ids for one in measured] == [g.ids for g in generated]
    assert [one.plain.ended for one in measured] == [g.ended for g in generated]


class Oracle:
    """A drafter that knows the answers, but for every token at a position in `wrong`."""

    def __init__(self, texts: list[list[int]], wrong: frozenset[int] = frozenset()) -> None:
        self.texts, self.wrong = texts, wrong

    def observe(self, rows_B: Tensor, slots_Bn: Tensor, aux_BnW: Tensor) -> None:
        """States tell it nothing new."""

    def draft(self, ids_BS: Tensor, known_B: Tensor, unread_B: Tensor, steps: int) -> Tensor:
        def token(text: list[int], position: int) -> int:
            right = text[position] if position < len(text) else 0
            return right + 1 if position in self.wrong else right

        return torch.tensor(
            [[token(t, int(n) + k) for k in range(steps)] for t, n in zip(self.texts, known_B, strict=True)]
        )

    def keep(self, rows_B: Tensor) -> None:
        self.texts = [self.texts[row] for row in rows_B.tolist()]


def chains_with(
    verifier: TransformersVerifier, steps: int, new: int, wrong: frozenset[int] = frozenset()
) -> list[Chain]:
    texts = sorted(verifier.generate(PROMPTS, Decoding(new + steps + 1, 4, ()), quiet), key=lambda g: g.index)
    cache = verifier.cache(len(PROMPTS), 4)
    first = prefill(verifier, cache, range(len(PROMPTS)), PROMPTS, 0, False).next_R.tolist()
    chains = [
        Chain(i, [*p, first[i]], len(p), new, [0] * steps, [0] * steps, ended=new == 1) for i, p in enumerate(PROMPTS)
    ]
    oracle = Oracle([t.ids for t in texts], wrong)
    decoder = ChainDecoder(verifier, oracle, cache, steps, frozenset(), chains)
    done = sorted((chain for ended in decoder.run() for chain in ended), key=lambda c: c.index)
    assert [c.ids for c in done] == [t.ids[: t.prompt_len + new] for t in texts]
    return done


@pytest.mark.parametrize(("steps", "new"), [(1, 9), (3, 13), (4, 11)])
def test_a_perfect_drafter_reaches_the_bound_of_k_plus_one(verifier, steps, new):
    for chain in chains_with(verifier, steps, new):
        assert chain.tokens == new - 1
        assert chain.calls == -(-(new - 1) // (steps + 1))
        assert chain.accepted == chain.proposed


def test_a_cut_answer_counts_only_the_tokens_before_the_cut(verifier):
    for chain in chains_with(verifier, 3, 4):
        assert (chain.tokens, chain.calls) == (3, 1)
        assert chain.proposed == [1, 1, 1]


def test_an_answer_of_one_token_makes_no_verify_call(verifier):
    for chain in chains_with(verifier, 3, 1):
        assert (chain.tokens, chain.calls, chain.proposed) == (0, 0, [0, 0, 0])


def test_a_wrong_draft_ends_its_chain_and_costs_nothing_else(verifier):
    shortest = min(map(len, PROMPTS))
    wrong = frozenset(range(shortest, 99, 2))

    for chain in chains_with(verifier, 3, 9, wrong):
        assert chain.accepted[1] + chain.accepted[2] <= chain.proposed[1]
        assert chain.tokens == 8


HITS = [
    # drafted, verified by the verifier, new tokens, proposed, accepted
    ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4], [1, 1, 1], [1, 1, 1]),
    ([1, 2, 9], [1, 2, 3, 4], [1, 2, 3], [1, 1, 1], [1, 1, 0]),
    ([1, 9, 3], [1, 2, 3, 4], [1, 2], [1, 1, 0], [1, 0, 0]),
    ([9, 2, 3], [1, 2, 3, 4], [1], [1, 0, 0], [0, 0, 0]),
    ([1, 7, 3], [1, 7, 3, 4], [1, 7], [1, 1, 0], [1, 1, 0]),  # 7 ends the answer: what lies behind does not count
]


@pytest.mark.parametrize(("drafted", "verified", "new", "proposed", "accepted"), HITS)
def test_a_round_counts_the_prefix_that_was_right_and_one_token_more(drafted, verified, new, proposed, accepted):
    chain = Chain(0, [5, 6], 1, 50, [0] * 3, [0] * 3)

    assert chain.take(drafted, verified, frozenset({7})) == new
    assert (chain.proposed, chain.accepted) == (proposed, accepted)
    assert chain.tokens == len(new)


def test_acceptance_length_of_a_fixed_hit_table_is_one_plus_the_prefix_hits_per_call():
    chain = Chain(0, [5, 6], 1, 50, [0] * 3, [0] * 3)
    for drafted, verified, *_ in HITS[:4]:
        chain.take(drafted, verified, frozenset())

    assert chain.tokens / chain.calls == 1 + (3 + 2 + 1 + 0) / 4


def test_different_answers_in_float32_are_never_excused(verifier):
    (plain,) = verifier.generate([PROMPTS[0]], Decoding(5, 1, ()), quiet)
    answer = plain.ids[plain.prompt_len :]
    other = [*answer[:2], answer[2] + 1, *answer[3:]]

    same = compare(verifier, PROMPTS[0], answer, answer, 0.0)
    differ = compare(verifier, PROMPTS[0], other, answer, 1e9)

    assert same.equal
    assert (differ.equal, differ.near_tie, differ.first_difference) == (False, False, 2)
    assert differ.gap is not None
    assert differ.gap > 0


def test_in_lower_precision_a_difference_is_excused_only_where_the_verifier_was_undecided(folder):
    verifier = model(folder, "bfloat16")
    (plain,) = verifier.generate([PROMPTS[0]], Decoding(5, 1, ()), quiet)
    answer = plain.ids[plain.prompt_len :]
    other = [*answer[:2], answer[2] + 1, *answer[3:]]
    gap = compare(verifier, PROMPTS[0], other, answer, 0.0).gap
    assert gap is not None

    assert compare(verifier, PROMPTS[0], other, answer, gap).near_tie
    assert not compare(verifier, PROMPTS[0], other, answer, gap * 0.9).near_tie
    assert not compare(verifier, PROMPTS[0], answer[:-1], answer, 1e9).near_tie


def test_costs_are_measured_for_one_token_a_chain_and_a_draft(verifier, folder):
    drafter = random_drafter(folder, 1, "eagle3.1", list(range(VOCAB)))

    costs = measure_costs(verifier, drafter, list(range(20)), 3)

    assert min(costs["verify_1_ms"], costs["verify_chain_ms"], costs["draft_ms"]) > 0
    assert (costs["num_steps"], costs["context_tokens"], costs["device"]) == (3, 20, "cpu")
