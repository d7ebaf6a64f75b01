"""Distances and their reduction, against the formulas written with plain numbers."""

from __future__ import annotations

import math

import pytest
import torch

from eagle3_core.drafter.losses import LossName, Objective, distance, reduce_pairs

P, Q = (0.7, 0.2, 0.1), (0.5, 0.1, 0.4)
OVERLAP = 0.5 + 0.1 + 0.1
CROSS_ENTROPY = -sum(p * math.log(q) for p, q in zip(P, Q, strict=True))
KL = sum(p * math.log(p / q) for p, q in zip(P, Q, strict=True))
LK_SHARE = math.exp(-3 * OVERLAP)


@pytest.mark.parametrize(
    ("loss", "want"),
    [
        ("soft_ce", CROSS_ENTROPY),
        ("kl", KL),
        ("tv", 1 - OVERLAP),
        ("lk", LK_SHARE * KL + (1 - LK_SHARE) * (1 - OVERLAP)),
    ],
)
def test_every_distance_is_its_formula(loss: LossName, want: float) -> None:
    d, alpha = distance(torch.tensor([Q]).log() + 5, torch.tensor([P]), loss, with_overlap=True)

    assert d.item() == pytest.approx(want, rel=1e-6)
    assert alpha is not None
    assert alpha.item() == pytest.approx(OVERLAP, rel=1e-6)


def test_a_teacher_that_is_certain_gives_a_finite_kl() -> None:
    d, _ = distance(torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 0.0]]), "kl", with_overlap=False)

    assert d.item() == pytest.approx(math.log(1 + math.exp(-1)), rel=1e-6)


def test_soft_cross_entropy_and_kl_have_the_same_gradient() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    teacher = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)).softmax(-1)

    grads = [
        torch.autograd.grad(distance(logits, teacher, loss, with_overlap=False)[0].sum(), logits)[0]
        for loss in ("soft_ce", "kl")
    ]

    assert torch.allclose(*grads, atol=1e-7)


def test_the_blend_of_lk_is_not_differentiated_through() -> None:
    logits, teacher = torch.tensor([Q]).log().requires_grad_(), torch.tensor([P])
    (both,) = torch.autograd.grad(distance(logits, teacher, "lk", with_overlap=True)[0].sum(), logits)

    (kl,) = torch.autograd.grad(distance(logits, teacher, "kl", with_overlap=True)[0].sum(), logits)
    (tv,) = torch.autograd.grad(distance(logits, teacher, "tv", with_overlap=True)[0].sum(), logits)

    assert torch.allclose(both, LK_SHARE * kl + (1 - LK_SHARE) * tv, atol=1e-6)


D = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 99.0]])
ALPHA = torch.tensor([[0.5, 0.5, 0.5], [0.25, 0.5, 99.0]])
VALID = torch.tensor([[True, True, True], [True, True, False]])


def quotient(objective: Objective) -> float:
    numerator, denominator = reduce_pairs(objective, D, ALPHA, VALID)
    return float(numerator / denominator)


def test_equal_weights_give_the_mean_over_valid_pairs() -> None:
    assert quotient(Objective(3)) == pytest.approx((1 + 2 + 4 + 8 + 16) / 5)


def test_decaying_weights_are_normalised_over_the_pairs_that_exist() -> None:
    want = (1 + 2 * 0.5 + 4 * 0.25 + 8 + 16 * 0.5) / (2 + 2 * 0.5 + 0.25)

    assert quotient(Objective(3, step_weights="decay", decay=0.5)) == pytest.approx(want)


def test_survival_weighs_a_step_by_the_chance_that_its_chain_is_alive() -> None:
    want = (1 + 2 * 0.5 + 4 * 0.25 + 8 + 16 * 0.25) / (2 + 0.5 + 0.25 + 0.25)

    assert quotient(Objective(3, step_weights="survival")) == pytest.approx(want)


def test_the_length_term_counts_a_chains_steps_minus_its_expected_accepted_tokens() -> None:
    missing = (3 - (0.5 + 0.25 + 0.125)) + (2 - (0.25 + 0.125))

    assert quotient(Objective(3, expected_length_weight=4.0)) == pytest.approx((31 + 4 * missing) / 5)


def test_survival_weights_carry_no_gradient() -> None:
    alpha = ALPHA.clone().requires_grad_()

    numerator, denominator = reduce_pairs(Objective(3, step_weights="survival"), D, alpha, VALID)

    assert not numerator.requires_grad
    assert not denominator.requires_grad


def test_numerators_and_denominators_of_two_batches_add_up_to_those_of_both() -> None:
    objective = Objective(3, step_weights="survival", expected_length_weight=1.0)
    whole = reduce_pairs(objective, D, ALPHA, VALID)

    parts = [reduce_pairs(objective, D[i : i + 1], ALPHA[i : i + 1], VALID[i : i + 1]) for i in range(2)]

    assert float(whole[0]) == pytest.approx(float(parts[0][0] + parts[1][0]))
    assert float(whole[1]) == pytest.approx(float(parts[0][1] + parts[1][1]))
