"""Why `tv` has a larger error than every smooth loss, shown in float64, and that it has not on the same side of the jumps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagle3_core.drafter.jumps import Truth, WithSides
from eagle3_core.drafter.losses import LossName, Objective, distance
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.plain import PlainOperations
from eagle3_core.drafter.reference import reference_loss
from eagle3_core.drafter.rows import lay_out
from eagle3_core.drafter.step import batch_loss
from eagle3_core.drafter.testing import pack, random_drafter, random_samples, random_teacher, tiny_config
from eagle3_core.drafter.verifier_parts import Teacher

ROWS, VOCABULARY = 256, 4000


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGITS, TEACHER = drawn(ROWS, VOCABULARY, seed=0), drawn(ROWS, VOCABULARY, seed=1).softmax(-1)


def slope(logits: Tensor, loss: LossName, below: Tensor | None = None) -> Tensor:
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(distance(leaf, TEACHER, loss, False, below)[0].sum(), leaf)
    return gradient


def moved_by(size: float, loss: LossName, below: Tensor | None = None) -> float:
    """Relative change of the logits' gradient when the logits are off by `size`."""
    still = slope(LOGITS, loss, below)
    return float((slope(LOGITS + size * drawn(ROWS, VOCABULARY, seed=2), loss, below) - still).norm() / still.norm())


SIZES = (1e-7, 1e-5, 1e-3)


@pytest.mark.parametrize("loss", ["soft_ce", "kl"])
def test_a_smooth_loss_answers_rounding_of_the_logits_in_proportion(loss: LossName) -> None:
    for size in SIZES:
        assert 0.5 * size < moved_by(size, loss) < 2 * size


def test_total_variation_answers_with_the_root_because_tokens_change_sides() -> None:
    changes = [moved_by(size, "tv") for size in (1e-4, 1e-2)]

    # log q - log p of two standard normals has the density 1/sqrt(4 pi) at 0; a share of E|move| times that changes sides.
    for size, change in zip((1e-4, 1e-2), changes, strict=True):
        share = size * (2 / torch.pi) ** 0.5 / (4 * torch.pi) ** 0.5
        assert 0.5 * share**0.5 < change < 4 * share**0.5
    assert changes[1] / changes[0] == pytest.approx(10, rel=0.3)  # of a hundredfold move


@pytest.mark.parametrize("loss", ["tv", "lk"])
def test_on_the_same_side_of_the_jumps_every_loss_answers_in_proportion(loss: LossName) -> None:
    below = LOGITS.softmax(-1) < TEACHER

    for size in SIZES:
        assert 0.3 * size < moved_by(size, loss, below) < 3 * size


def test_away_from_ties_no_token_changes_sides_and_the_root_is_gone() -> None:
    size = 1e-4
    moved = LOGITS + size * drawn(ROWS, VOCABULARY, seed=2)
    tie = (LOGITS.log_softmax(-1) - TEACHER.log()).abs() < 12 * size
    change = (slope(moved, "tv") - slope(LOGITS, "tv")).masked_fill(tie, 0.0)

    assert 0 < int(tie.sum()) < 0.01 * tie.numel()
    assert float(change.norm() / slope(LOGITS, "tv").norm()) < 10 * size
    assert moved_by(size, "tv") > 20 * size


def in_float64(drafter: Drafter, teacher: Teacher) -> tuple[Drafter, Teacher]:
    weights = {name: w.detach().double().requires_grad_() for name, w in drafter.weights.items()}
    return replace(drafter, weights=weights), teacher.to("cpu", torch.float64)


@pytest.mark.parametrize(
    "objective", [Objective(3, "tv", "decay"), Objective(3, "lk", "survival", expected_length_weight=4.0)]
)
def test_the_step_in_bf16_lies_nearer_to_the_truth_on_its_own_side_than_to_the_other(objective: Objective) -> None:
    config = tiny_config(vocab=2000, draft_vocab=1500)
    drafter, teacher = random_drafter(config), random_teacher(config)
    batch = pack(random_samples(["0" * 5 + "1" * 60, "0" * 4 + "1" * 30], vocab=2000), 3)
    half, operations = drafter.at("cpu", torch.bfloat16), WithSides(PlainOperations(config))
    numerator, denominator, _ = batch_loss(
        half, teacher.to("cpu", torch.bfloat16), batch, objective, operations=operations
    )
    (numerator / denominator.detach()).backward()

    wide, judge = in_float64(drafter, teacher)
    truth = Truth(operations.below(lay_out(batch.plan, batch.offsets)))
    errors: list[float] = []
    for measure in (truth, distance):
        for weight in wide.weights.values():
            weight.grad = None
        numerator, denominator, _ = reference_loss(wide, judge, batch, objective, measure=measure)
        (numerator / denominator.detach()).backward()
        errors.append(
            max(float((drafter.weights[name].grad - w.grad).norm() / w.grad.norm()) for name, w in wide.weights.items())
        )

    assert truth.flips > 0
    assert truth.widest_gap < 0.5  # sides differ where rounding decides, and nowhere else
    assert errors[0] < errors[1]


def test_the_sides_of_a_step_that_has_not_rounded_are_the_references() -> None:
    config, objective = tiny_config(), Objective(3, "tv")
    drafter, teacher = random_drafter(config), random_teacher(config)
    batch = pack(random_samples(["0011111111", "000000", "0" * 5 + "1" * 9, "010101"]), 3, "speculators")
    operations = WithSides(PlainOperations(config))
    batch_loss(drafter, teacher, batch, objective, operations=operations)

    wide, judge = in_float64(drafter, teacher)
    truth = Truth(operations.below(lay_out(batch.plan, batch.offsets)))
    reference_loss(wide, judge, batch, objective, measure=truth)

    assert truth.flips == 0
