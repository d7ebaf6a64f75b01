"""All weights in one buffer: nothing is copied that need not be, and nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle3_core.drafter.flat import GATE_UP, HEAD, QKV, FlatWeights, stacked
from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.step import batch_loss
from eagle3_core.drafter.testing import pack, random_drafter, random_samples, random_teacher, tiny_config


def trained(drafter: Drafter) -> None:
    batch = pack(random_samples(["0011111", "0111"]), 3)
    batch_loss(drafter, random_teacher(drafter.config), batch, Objective(3))[0].backward()


def test_matrices_that_read_the_same_rows_are_one_matrix_without_a_copy() -> None:
    flat = FlatWeights(random_drafter(tiny_config()), "cpu", torch.float32)

    for group in (QKV, GATE_UP):
        parts = [flat.drafter.weights[name].detach() for name in group]
        assert stacked(parts).data_ptr() == parts[0].data_ptr()
        assert torch.equal(stacked(parts), torch.cat(parts))
    apart = [p.clone() for p in parts]
    assert torch.equal(stacked(apart), torch.cat(parts))


def test_the_gradient_of_one_pass_is_one_tensor_without_a_copy_and_equals_the_gradients_by_name() -> None:
    plain = random_drafter(tiny_config())
    flat = FlatWeights(plain, "cpu", torch.float32)
    trained(plain)

    trained(flat.drafter)
    gradient = flat.gradient()

    first = flat.drafter.weights["fc.weight"].grad
    assert gradient.data_ptr() == first.data_ptr()
    for name, slot in flat.slots.items():
        assert torch.allclose(slot.of(gradient), plain.weights[name].grad, rtol=1e-5, atol=1e-6), name
    assert int((gradient != 0).sum()) <= sum(w.numel() for w in plain.weights.values())


def test_gradients_that_lie_elsewhere_are_gathered() -> None:
    flat = FlatWeights(random_drafter(tiny_config()), "cpu", torch.float32)
    for weight in flat.drafter.weights.values():
        weight.grad = torch.ones_like(weight)
    flat.drafter.weights["norm.weight"].grad = None

    gradient = flat.gradient()

    assert float(gradient.sum()) == sum(w.numel() for n, w in flat.drafter.weights.items() if n != "norm.weight")
    flat.clear()
    assert all(w.grad is None for w in flat.drafter.weights.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_head_lies_outside_and_masters_are_float32(dtype: torch.dtype) -> None:
    drafter = random_drafter(tiny_config())
    drafter.weights["lm_head.weight"].requires_grad_(False)

    flat = FlatWeights(drafter, "cpu", dtype)

    assert "lm_head.weight" not in flat.slots
    assert list(flat.drafter.weights) == list(drafter.weights)
    assert all(torch.equal(flat.masters()[n], drafter.weights[n]) for n in flat.slots)
    assert all(w.dtype == dtype for w in flat.drafter.weights.values())
    assert (flat.master_N is flat.compute_N) == (dtype == torch.float32)


@pytest.mark.parametrize("train_head", [True, False])
@pytest.mark.parametrize("algorithm", ["eagle3.1", "eagle3"])
def test_every_element_of_a_gradient_is_told_once_and_final(train_head: bool, algorithm: Any) -> None:
    drafter = random_drafter(tiny_config(algorithm))
    for name, weight in drafter.weights.items():
        weight.requires_grad_(train_head or name != HEAD)
    flat = FlatWeights(drafter, "cpu", torch.float32)
    batch, teacher = pack(random_samples(["0011111", "01101"]), 3), random_teacher(drafter.config)
    told: list[tuple[slice, torch.Tensor]] = []

    def tell(part: torch.Tensor) -> None:
        start = part.storage_offset()
        told.append((slice(start, start + len(part)), part.clone()))

    batch_loss(flat.drafter, teacher, batch, Objective(3), tell=tell)[0].backward()

    assert [part for part, _ in told] == [part for portion in flat.portions for part in portion]
    assert len(told) >= (3 if train_head else 2)
    assert all(torch.equal(flat.gradient()[part], values) for part, values in told)
    times_N = torch.zeros(len(flat.compute_N))
    for part, _ in told:
        times_N[part] += 1
    assert bool((times_N == 1).all())
