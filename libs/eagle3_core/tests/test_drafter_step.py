"""The fast step against a plain one (`plain_step`): one chain at a time, one position at a time, in float64.

Longer batches are compared with `drafter.reference`, which is compared with the plain one in turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_step import plain_loss
from torch import Tensor

from eagle3_core.drafter import head, plain_attention, reference
from eagle3_core.drafter.losses import Objective, reduce_pairs
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.reference import reference_loss
from eagle3_core.drafter.step import PackedBatch, batch_loss
from eagle3_core.drafter.testing import pack, random_drafter, random_samples, random_teacher, tiny_config
from eagle3_core.drafter.verifier_parts import Teacher


def fast_loss(
    drafter: Drafter, teacher: Teacher, batch: PackedBatch, objective: Objective, loss: Any = batch_loss
) -> tuple[Tensor, dict[str, Tensor]]:
    for weight in drafter.weights.values():
        weight.grad = None
    numerator, denominator, _ = loss(drafter, teacher, batch, objective)
    loss = numerator / denominator.detach()
    loss.backward()
    return loss.detach(), {n: w.grad if w.grad is not None else torch.zeros_like(w) for n, w in drafter.weights.items()}


def assert_same(
    have: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]], rel: float = 3e-5
) -> None:
    assert float(have[0]) == pytest.approx(float(want[0]), rel=rel)
    scale = max(float(g.norm()) for g in want[1].values())
    for name, gradient in want[1].items():
        gap = float((have[1][name] - gradient).norm())
        assert gap <= rel * max(float(gradient.norm()), 0.01 * scale), name


span = st.builds(lambda a, b: "0" * a + "1" * b, st.integers(0, 4), st.integers(1, 5))
scattered = st.text(alphabet="01", min_size=1, max_size=9)
texts = st.lists(st.one_of(span, scattered, st.builds("".join, st.tuples(span, span))), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    masks=texts,
    steps=st.integers(1, 4),
    rule=st.sampled_from(["serving", "speculators", "specforge"]),
    algorithm=st.sampled_from(["eagle3.1", "eagle3"]),
    heads=st.sampled_from([(4, 2), (2, 2), (4, 1)]),
    loss=st.sampled_from(["soft_ce", "kl", "tv", "lk"]),
    weights=st.sampled_from(["equal", "decay", "survival"]),
    length=st.sampled_from([0.0, 4.0]),
    final=st.sampled_from(["pre", "post"]),
    seed=st.integers(0, 3),
)
def test_loss_and_every_gradient_equal_those_of_the_plain_step(
    masks, steps, rule, algorithm, heads, loss, weights, length, final, seed
) -> None:
    config = tiny_config(algorithm, heads=heads[0], kv_heads=heads[1], steps=steps)
    drafter, teacher = random_drafter(config, seed), random_teacher(config, final=final)
    samples, objective = random_samples(masks, seed=seed), Objective(steps, loss, weights, 0.8, length)
    batch = pack(samples, steps, rule)
    if batch.plan.pairs == 0:
        numerator, denominator, _ = batch_loss(drafter, teacher, batch, objective)
        assert (float(numerator.detach()), float(denominator)) == (0.0, 0.0)
        return

    want = plain_loss(drafter, teacher, samples, objective, rule)
    assert_same(fast_loss(drafter, teacher, batch, objective), want)
    assert_same(fast_loss(drafter, teacher, batch, objective, reference_loss), want)


@pytest.mark.parametrize("density", [1.0, 0.7, 0.3])
@pytest.mark.parametrize("algorithm", ["eagle3.1", "eagle3"])
def test_longer_documents_agree_at_every_density(density: float, algorithm) -> None:
    generator = torch.Generator().manual_seed(7)
    masks = ["".join("01"[int(torch.rand((), generator=generator) < density)] for _ in range(n)) for n in (23, 31)]
    config = tiny_config(algorithm)
    drafter, teacher, samples = random_drafter(config), random_teacher(config), random_samples(masks)
    objective = Objective(3, step_weights="survival", expected_length_weight=1.0)

    have = fast_loss(drafter, teacher, pack(samples, 3), objective)

    assert_same(have, plain_loss(drafter, teacher, samples, objective, "serving"))


@pytest.mark.parametrize("loss", ["soft_ce", "lk"])
def test_slices_of_rows_and_scores_change_nothing(monkeypatch: pytest.MonkeyPatch, loss) -> None:
    config = tiny_config()
    drafter, teacher, samples = (
        random_drafter(config),
        random_teacher(config),
        random_samples(["0001111101111", "011111"]),
    )
    objective = Objective(3, loss, "survival", expected_length_weight=1.0)
    whole = fast_loss(drafter, teacher, pack(samples, 3), objective)

    monkeypatch.setattr(head, "HEAD_BYTES", 3 * 4 * config.draft_vocab_size)
    monkeypatch.setattr(plain_attention, "SCORE_ELEMENTS", 2 * config.num_heads * 11)
    monkeypatch.setattr(plain_attention, "KEPT_ELEMENTS", 60)
    monkeypatch.setattr(reference, "HEAD_ELEMENTS", 3 * config.draft_vocab_size)
    monkeypatch.setattr(reference, "SCORE_ELEMENTS", 2 * config.num_heads * 11)

    assert_same(fast_loss(drafter, teacher, pack(samples, 3), objective), whole, rel=1e-6)
    assert_same(fast_loss(drafter, teacher, pack(samples, 3), objective, reference_loss), whole, rel=1e-6)


def masks_of(kind: str, density: float, length: int, generator: torch.Generator) -> str:
    """A mask of about `density`: `spans` in turns, `scattered` tokens, or `all` but the first."""
    if kind == "scattered":
        return "".join("01"[int(torch.rand((), generator=generator) < density)] for _ in range(length))
    turn = 16 if kind == "spans" else length
    asked = max(1, round(turn * (1 - density)))
    return (("0" * asked + "1" * (turn - asked)) * (length // turn + 1))[:length]


def agrees_on_packed_documents(kind: str, density: float, heads: tuple[int, int], train_head: bool, scale: int) -> None:
    generator = torch.Generator().manual_seed(11)
    masks = [masks_of(kind, density, n * scale, generator) for n in (25, 3, 14)] + ["0" * 9, "0" * 12 + "11"]
    config = tiny_config(heads=heads[0], kv_heads=heads[1], steps=4)
    drafter, teacher = random_drafter(config), random_teacher(config)
    drafter.weights["lm_head.weight"].requires_grad_(train_head)
    batch = pack(random_samples(masks), 4, "speculators")

    for objective in (Objective(4, step_weights="decay"), Objective(4, "lk", "survival", expected_length_weight=2.0)):
        want = fast_loss(drafter, teacher, batch, objective, reference_loss)
        assert_same(fast_loss(drafter, teacher, batch, objective), want, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "density", "heads", "train_head"),
    [("spans", 1.0, (4, 2), True), ("spans", 0.3, (4, 4), False), ("scattered", 0.7, (4, 1), True)],
)
def test_packed_documents_of_every_kind_agree_with_the_reference(kind, density, heads, train_head) -> None:
    agrees_on_packed_documents(kind, density, heads, train_head, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spans", "scattered"])
@pytest.mark.parametrize("density", [1.0, 0.7, 0.3])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
@pytest.mark.parametrize("train_head", [True, False])
def test_longer_packed_documents_agree_with_the_reference(kind, density, heads, train_head) -> None:
    agrees_on_packed_documents(kind, density, heads, train_head, 12)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_every_activation_has_its_own_slope(activation: str) -> None:
    config = tiny_config().model_copy(update={"hidden_act": activation})
    drafter, teacher, batch = random_drafter(config), random_teacher(config), pack(random_samples(["0011111111"]), 3)

    have = fast_loss(drafter, teacher, batch, Objective(3))

    assert_same(have, fast_loss(drafter, teacher, batch, Objective(3), reference_loss), rel=1e-5)


def test_a_pass_in_bfloat16_stays_near_the_one_in_float32() -> None:
    config, objective = tiny_config(), Objective(3)
    drafter, teacher = random_drafter(config), random_teacher(config)
    batch = pack(random_samples(["0" * 6 + "1" * 60, "0" * 10 + "1" * 30]), 3)
    exact = fast_loss(drafter, teacher, batch, objective)

    half = drafter.at("cpu", torch.bfloat16)
    numerator, denominator, _ = batch_loss(half, teacher.to("cpu", torch.bfloat16), batch, objective)
    for weight in drafter.weights.values():
        weight.grad = None
    (numerator / denominator).backward()

    assert float(numerator.detach() / denominator) == pytest.approx(float(exact[0]), rel=1e-2)
    for name, weight in drafter.weights.items():
        assert float((weight.grad - exact[1][name]).norm() / exact[1][name].norm()) < 0.05, name


def test_noise_reaches_the_aux_states_and_nothing_else() -> None:
    config, objective = tiny_config(), Objective(3)
    drafter, teacher = random_drafter(config), random_teacher(config)
    batch = pack(random_samples(["0011111", "0111"]), 3)
    louder = replace(batch, aux_T3H=batch.aux_T3H * 1.5 + 0.1)

    noisy = batch_loss(drafter, teacher, batch, objective, lambda aux: aux * 1.5 + 0.1)[0]

    assert float(noisy.detach()) == float(batch_loss(drafter, teacher, louder, objective)[0].detach())


def test_gradients_of_two_passes_add_up() -> None:
    config, objective = tiny_config(), Objective(3)
    drafter, teacher = random_drafter(config), random_teacher(config)
    samples = random_samples(["0011111", "011111"])
    parts = [pack(replace(samples, samples=(s,)), 3) for s in samples.samples]
    numerator, _, _ = batch_loss(drafter, teacher, pack(samples, 3), objective)
    numerator.backward()
    whole = {name: w.grad.clone() for name, w in drafter.weights.items()}
    for weight in drafter.weights.values():
        weight.grad = None

    for part in parts:
        batch_loss(drafter, teacher, part, objective)[0].backward()

    for name, weight in drafter.weights.items():
        assert torch.allclose(weight.grad, whole[name], rtol=1e-4, atol=1e-5), name


def test_a_pass_without_gradients_gives_the_same_loss() -> None:
    config = tiny_config()
    drafter, teacher, batch = random_drafter(config), random_teacher(config), pack(random_samples(["0011111"]), 3)
    learning = batch_loss(drafter, teacher, batch, Objective(3, "lk", "survival"))

    with torch.no_grad():
        judged = batch_loss(drafter, teacher, batch, Objective(3, "lk", "survival"))

    assert float(judged[0]) == float(learning[0].detach())
    assert not judged[0].requires_grad


def test_two_documents_packed_are_the_two_documents_alone() -> None:
    config, objective = tiny_config(), Objective(3)
    drafter, teacher, masks = random_drafter(config), random_teacher(config), ["0001111", "11111111", "0011"]
    samples = random_samples(masks)
    alone = [replace(samples, samples=(s,)) for s in samples.samples]

    together = batch_loss(drafter, teacher, pack(samples, 3), objective)
    apart = [batch_loss(drafter, teacher, pack(one, 3), objective) for one in alone]

    assert float(together[0].detach()) == pytest.approx(sum(float(n.detach()) for n, _, _ in apart), rel=1e-6)
    assert float(together[1]) == pytest.approx(sum(float(d) for _, d, _ in apart), rel=1e-6)
    assert together[2].tried_K.tolist() == torch.stack([c.tried_K for *_, c in apart]).sum(0).tolist()


def test_tokens_behind_the_last_chain_change_nothing() -> None:
    config, objective = tiny_config(), Objective(3)
    drafter, teacher = random_drafter(config), random_teacher(config)
    samples = random_samples(["001111", "0011110000"])
    long = samples.samples[1]
    short = replace(long, input_ids=long.input_ids[:6], loss_mask=long.loss_mask[:6], aux=long.aux[:6])
    short = replace(short, final=long.final[long.final_index < 6], final_index=long.final_index[long.final_index < 6])

    cut = fast_loss(drafter, teacher, pack(replace(samples, samples=(samples.samples[0], short)), 3), objective)

    assert_same(fast_loss(drafter, teacher, pack(samples, 3), objective), cut, rel=1e-6)


def test_a_batch_without_supervision_has_a_zero_gradient_and_no_nan() -> None:
    config = tiny_config()
    drafter, batch = random_drafter(config), pack(random_samples(["00000", "0100"]), 3)

    numerator, denominator, counts = batch_loss(drafter, random_teacher(config), batch, Objective(3))
    numerator.backward()

    assert float(denominator) == 0.0
    assert counts.tried_K.tolist() == [0, 0, 0]
    assert all(w.grad is not None and not w.grad.any() for w in drafter.weights.values())


def test_what_is_fed_back_is_normed_in_eagle3_1_only() -> None:
    old = random_drafter(tiny_config("eagle3"))
    new = replace(old, config=old.config.model_copy(update={"algorithm": "eagle3.1"}))
    ones = {f"fc_norm.{i}.weight": torch.ones(16) for i in range(3)}
    new = replace(new, weights={**old.weights, **ones})
    attended, hidden = torch.randn(5, 4, 8), torch.randn(5, 16)

    raw, normed = old.finish(attended, hidden), new.finish(attended, hidden)

    assert not torch.allclose(raw, normed, atol=0.1)
    assert torch.allclose(old.logits(raw), new.logits(normed), atol=1e-6)


def test_accuracy_counts_only_chains_that_are_still_right_and_misses_outside_the_draft_vocabulary() -> None:
    config = tiny_config()
    drafter, samples = random_drafter(config), random_samples(["0" * 3 + "1" * 20])
    batch = pack(samples, 3)

    _, _, counts = batch_loss(drafter, random_teacher(config), batch, Objective(3))

    hits, tried = counts.hits_K.tolist(), counts.tried_K.tolist()
    assert tried[0] == 19
    assert all(later <= earlier for later, earlier in zip(tried[1:], hits, strict=False))
    absent = ~drafter.t2d_V
    blind = replace(batch, input_ids_T=torch.where(torch.ones(23).bool(), absent.nonzero()[0], 0))
    assert batch_loss(drafter, random_teacher(config), blind, Objective(3))[2].hits_K.tolist() == [0, 0, 0]


def test_reduce_pairs_never_reads_what_is_not_valid() -> None:
    d, valid = torch.tensor([[1.0, float("nan")]]), torch.tensor([[True, False]])

    numerator, denominator = reduce_pairs(Objective(2), d, None, valid)

    assert float(numerator / denominator) == 1.0
