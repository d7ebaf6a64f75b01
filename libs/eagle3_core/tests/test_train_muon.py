"""Muon moves matrices by orthogonal factors, leaves the rest to AdamW, and goes on from a checkpoint exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3_core.drafter.flat import HEAD, FlatWeights
from eagle3_core.drafter.testing import random_drafter, tiny_config
from eagle3_core.jobs.spec import Training
from eagle3_core.train.muon import FlatMuon, orthogonal
from eagle3_core.train.optim import FlatAdamW

BETAS = (0.9, 0.95)


def gradients(flat: FlatWeights, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(flat.master_N.shape, generator=generator) for _ in range(count)]


def walk(optimizer: FlatMuon | FlatAdamW, steps: list[Tensor]) -> None:
    for gradient_N in steps:
        optimizer.step(gradient_N.clone(), torch.tensor(0.5, dtype=torch.float64), 0.01)


def fresh() -> FlatWeights:
    return FlatWeights(random_drafter(tiny_config()), "cpu", torch.float32)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_all_directions_of_a_matrix_become_about_equally_long(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100.0

    left, values, right = torch.linalg.svd(orthogonal(matrix), full_matrices=False)

    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.4
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert float(((left @ right) * (u @ v)).sum()) == pytest.approx(min(shape), rel=1e-3)


def test_no_gradient_moves_nothing() -> None:
    assert orthogonal(torch.zeros(4, 6)).abs().max() == 0


def test_a_first_step_moves_each_matrix_along_its_gradients_factor_and_by_the_size_of_adamws() -> None:
    flat, before = fresh(), fresh()
    (gradient_N,) = gradients(flat, 1)

    walk(FlatMuon(flat, BETAS, 0.0), [gradient_N])

    for name, slot in flat.slots.items():
        if len(slot.shape) == 2 and name != HEAD:
            moved = slot.of(before.master_N) - slot.of(flat.master_N)
            expected = 0.01 * 0.2 * max(slot.shape) ** 0.5 * orthogonal(slot.of(gradient_N))
            assert torch.allclose(moved, expected, rtol=1e-3, atol=1e-6), name
            assert 0.0005 < float(moved.pow(2).mean().sqrt()) < 0.003, name


def test_head_and_gains_take_adamws_steps() -> None:
    mixed, plain = fresh(), fresh()
    steps = gradients(mixed, 3)

    walk(FlatMuon(mixed, BETAS, 0.1), steps)
    walk(FlatAdamW(plain, BETAS, 0.1), steps)

    others = [name for name, slot in mixed.slots.items() if len(slot.shape) == 1 or name == HEAD]
    assert len(others) == 8
    for name in others:
        assert torch.allclose(mixed.masters()[name], plain.masters()[name], rtol=1e-6, atol=1e-7), name


def test_weight_decay_shrinks_a_matrix_that_has_no_gradient() -> None:
    flat, before = fresh(), fresh()

    walk(FlatMuon(flat, BETAS, 0.5), [torch.zeros_like(flat.master_N)])

    assert torch.allclose(flat.masters()["fc.weight"], before.masters()["fc.weight"] * (1.0 - 0.01 * 0.5))


def test_the_products_copy_follows_the_masters() -> None:
    flat = FlatWeights(random_drafter(tiny_config()), "cpu", torch.bfloat16)

    walk(FlatMuon(flat, BETAS, 0.0), gradients(flat, 2))

    assert torch.equal(flat.compute_N, flat.master_N.bfloat16())


def test_going_on_from_kept_moments_takes_the_same_steps_to_the_last_bit() -> None:
    straight, cut = fresh(), fresh()
    steps = gradients(straight, 6)
    walk(FlatMuon(straight, BETAS, 0.0), steps)

    first = FlatMuon(cut, BETAS, 0.0)
    walk(first, steps[:4])
    second = FlatMuon(cut, BETAS, 0.0)
    for mine, kept in zip(second.moments().values(), first.moments().values(), strict=True):
        mine.copy_(kept)
    second.begin_at(int(first.count))
    walk(second, steps[4:])

    assert torch.equal(cut.master_N, straight.master_N)


def test_muon_on_split_matrices_is_refused_where_the_job_is_read() -> None:
    with pytest.raises(ValueError, match="muon needs whole matrices"):
        Training(optimizer="muon", sharding="fsdp2")
