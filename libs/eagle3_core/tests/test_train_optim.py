"""The learning rate by step, the clip, and an optimizer that comes back exactly."""

from __future__ import annotations

import math

import pytest
import torch

from eagle3_core.drafter.flat import FlatWeights
from eagle3_core.drafter.testing import random_drafter, tiny_config
from eagle3_core.train.optim import AdamW, FlatAdamW, clipped, learning_rate


def rates(schedule, total: int = 10, warmup: float = 0.2, low: float = 0.1) -> list[float]:
    return [
        learning_rate(s, total, peak=2.0, schedule=schedule, warmup_ratio=warmup, min_ratio=low) for s in range(total)
    ]


def test_the_rate_rises_in_equal_steps_and_then_falls_to_its_share_of_the_peak() -> None:
    cosine, linear, constant = rates("cosine"), rates("linear"), rates("constant")

    assert cosine[:3] == linear[:3] == constant[:3] == [1.0, 2.0, 2.0]
    assert linear[2:] == pytest.approx([2.0 * (0.1 + 0.9 * (1 - i / 8)) for i in range(8)])
    assert cosine[2:] == pytest.approx([2.0 * (0.1 + 0.45 * (1 + math.cos(math.pi * i / 8))) for i in range(8)])
    assert constant[2:] == [2.0] * 8


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("total", [1, 2, 7])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
def test_every_rate_is_positive_and_at_most_the_peak(schedule, total: int, warmup: float) -> None:
    assert all(0 < rate <= 2.0 for rate in rates(schedule, total, warmup, low=0.0))


def test_the_norm_is_divided_by_the_denominator_and_the_scale_clips_it() -> None:
    norm, scale = clipped(torch.tensor(50.0), torch.tensor(10.0), 1.0)

    assert float(norm) == pytest.approx(5.0)
    assert (torch.tensor([30.0, 40.0]) * scale).tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize(("summed", "share"), [(1.0, 0.25), (0.0, 0.25)])
def test_a_small_gradient_is_not_scaled_up(summed: float, share: float) -> None:
    norm, scale = clipped(torch.tensor(summed), torch.tensor(4.0), 1.0)

    assert (float(norm), float(scale)) == (summed / 4.0, share)


def walk(adam: AdamW, parameter: torch.Tensor, steps: range) -> None:
    for step in steps:
        parameter.grad = torch.full_like(parameter, math.sin(step + 1.0))
        adam.step(0.01)


def test_a_restored_optimizer_takes_the_same_steps_to_the_last_bit() -> None:
    straight = torch.ones(5, requires_grad=True)
    walk(AdamW({"w": straight}, (0.9, 0.95), 0.1), straight, range(300))

    first = torch.ones(5, requires_grad=True)
    before = AdamW({"w": first}, (0.9, 0.95), 0.1)
    walk(before, first, range(270))
    second = first.detach().clone().requires_grad_()
    after = AdamW({"w": second}, (0.9, 0.95), 0.1)
    after.restore({name: t.clone() for name, t in before.state().items()})
    walk(after, second, range(270, 300))

    assert torch.equal(second, straight)
    assert {t.dtype for t in before.state().values()} == {torch.float32}


def test_an_optimizer_that_has_not_stepped_restores_to_a_fresh_one() -> None:
    parameter = torch.ones(2, requires_grad=True)
    adam = AdamW({"w": parameter}, (0.9, 0.95), 0.0)

    adam.restore(adam.state())
    walk(adam, parameter, range(1))

    assert parameter.tolist() == pytest.approx([0.99, 0.99])


def test_flat_steps_are_torchs_own_on_each_weight_alone() -> None:
    drafter = random_drafter(tiny_config())
    flat = FlatWeights(drafter, "cpu", torch.float32)
    together = FlatAdamW(flat, (0.9, 0.95), 0.1)
    apart = {name: w.detach().clone().requires_grad_() for name, w in drafter.weights.items()}
    reference = torch.optim.AdamW(apart.values(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)

    for step in range(4):
        gradient_N = torch.randn(flat.master_N.shape, generator=generator)
        for name, slot in flat.slots.items():
            apart[name].grad = 0.5 * slot.of(gradient_N).clone()
        reference.step()
        together.step(gradient_N, torch.tensor(0.5), 0.01)
        assert int(together.count) == step + 1

    for name, weight in flat.masters().items():
        assert torch.allclose(weight, apart[name], rtol=1e-6, atol=1e-7), name
