"""Every kernel against the same operation in torch, and the whole step against the reference, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_core.drafter.losses import LossName, Objective
from eagle3_core.drafter.plain import PlainOperations
from eagle3_core.drafter.reference import reference_loss
from eagle3_core.drafter.step import batch_loss
from eagle3_core.drafter.testing import pack, random_drafter, random_samples, random_teacher, tiny_config

pytest.importorskip("triton")  # comes with torch's CUDA wheels for Linux

from interpreted import kernels

from eagle3_core.drafter.kernels.adamw import adamw

CONFIG = tiny_config().model_copy(update={"head_dim": 16})


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both(config: Any = CONFIG) -> tuple[Any, Any]:
    return kernels(config), PlainOperations(config)


def assert_alike(have: Any, want: Any) -> None:
    for a, b in zip(have, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_norms_forward_and_backward() -> None:
    x, add, d, gain, rows = (
        drawn(5, 16),
        drawn(3, 16, seed=1),
        drawn(3, 16, seed=2),
        drawn(16, seed=3),
        torch.tensor([4, 0, 2]),
    )
    found = []
    for ops in both():
        out, rstd, total = torch.empty(2, 16), torch.empty(2), torch.empty(3, 16)
        ops.norm(x, gain, 1e-5, out, rstd, add=add, rows=rows, total=total)
        back, plus, sums = drawn(5, 16, seed=4), drawn(2, 16, seed=5), ops.gain_sums(16)
        ops.norm_backward(d[:2], x, rstd, gain, back, sums, rows=rows[:2], residual=d[:2])
        ops.norm_backward(d[:2], total[:2], rstd, gain, plus, sums, accumulate=True)
        found.append((out, rstd, total, back, plus, sums.sum(0)))

    assert_alike(*found)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_gates_of_every_activation(activation: str) -> None:
    config, found = CONFIG.model_copy(update={"hidden_act": activation}), []
    for ops in both(config):
        gate_up, out = drawn(2, 48), torch.empty(2, 24)
        ops.gate(gate_up, out)
        ops.gate_backward(gate_up, drawn(2, 24, seed=1))
        found.append((out, gate_up))

    assert_alike(*found)


def test_rotation_there_and_back_with_an_addend() -> None:
    tables = random_drafter(CONFIG).rope.half_tables(torch.device("cpu"), 16)
    positions, rows, found = torch.tensor([3, 9]), torch.tensor([2, 0]), []
    for ops in both():
        wide = drawn(2, 80)
        ops.rotate(wide[:, 16:80], positions, 4, 2, tables, add=drawn(3, 64, seed=1), rows=rows)
        there = wide.clone()
        ops.rotate(wide[:, 16:80], positions, 4, 2, tables, inverse=True)
        found.append((there, wide))

    assert_alike(*found)


def test_folded_gains_gathered_sums_and_scaling() -> None:
    matrix, gain, d, pairs = (
        drawn(5, 24)[:, 4:20],
        drawn(16, seed=1),
        drawn(5, 16, seed=2),
        torch.tensor([0, -1, 2, -1, 1, 3]),
    )
    found = []
    for ops in both():
        d_matrix, scaled = torch.zeros(5, 16), torch.empty(5, 16)
        d_gain = ops.fold_backward(d, matrix, gain, d_matrix)
        ops.scale(d, torch.tensor(0.3), scaled)
        sums = [ops.gather_sum(d, pairs, 2, first) for first in (None, drawn(3, 16, seed=3))]
        found.append((d_matrix, d_gain, scaled, *sums))

    assert_alike(*found)


@pytest.mark.parametrize("loss", ["soft_ce", "kl", "tv", "lk"])
@pytest.mark.parametrize("overlap", [True, False])
def test_scores_and_the_gradient_of_the_logits(loss: LossName, overlap: bool) -> None:
    label, found = torch.tensor([5, 5, 6]), []
    for ops in both():
        logits, teacher = 2 * drawn(3, 40), 2 * drawn(2, 40, seed=1)
        scores = ops.score(logits, teacher, label, 5, loss, overlap=overlap)
        d_overlap = drawn(3, seed=3) if overlap else None
        ops.score_backward(logits, teacher, label, 5, loss, scores, drawn(3, seed=2), d_overlap)
        read = [scores.overlap, scores.below] if overlap or loss in ("tv", "lk") else []
        found.append((scores.distance, scores.best, scores.student_log_sum, scores.teacher_log_sum, logits, *read))

    assert_alike(*found)


def test_adamw_is_torchs() -> None:
    weight = drawn(70).requires_grad_()
    theirs = torch.optim.AdamW([weight], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    master, copy, m, v = weight.detach().clone(), torch.zeros(70), torch.zeros(70), torch.zeros(70)

    for step in (1, 2):
        gradient = drawn(70, seed=step)
        weight.grad = gradient * 0.25
        theirs.step()
        adamw(
            master, copy, gradient, m, v, torch.tensor(0.25), rate=0.01, betas=(0.9, 0.95), weight_decay=0.1, step=step
        )

    assert torch.allclose(master, weight.detach(), rtol=1e-5, atol=1e-7)
    assert torch.equal(copy, master)


def agrees(
    masks: list[str], algorithm: Any, objective: Objective, rule: Any = "serving", heads: tuple[int, int] = (4, 2)
) -> None:
    config = tiny_config(algorithm, heads=heads[0], kv_heads=heads[1]).model_copy(update={"head_dim": 16})
    drafter, teacher = random_drafter(config), random_teacher(config)
    batch, found = pack(random_samples(masks), 3, rule), []
    for loss, more in ((batch_loss, {"operations": kernels(config)}), (reference_loss, {})):
        for weight in drafter.weights.values():
            weight.grad = None
        numerator, denominator, counts = loss(drafter, teacher, batch, objective, **more)
        numerator.backward()
        found.append((numerator.detach(), denominator, counts, {n: w.grad.clone() for n, w in drafter.weights.items()}))
    (numerator, denominator, counts, have), (want_n, want_d, want_counts, want) = found
    assert float(numerator / denominator) == pytest.approx(float(want_n / want_d), rel=1e-5)
    assert counts.hits_K.tolist() == want_counts.hits_K.tolist()
    for name, gradient in want.items():
        assert float((have[name] - gradient).norm() / gradient.norm()) < 2e-5, name


def test_the_step_on_two_short_documents_equals_the_reference() -> None:
    agrees(["00111", "0111"], "eagle3.1", Objective(3, "lk", "survival", expected_length_weight=1.0))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
@pytest.mark.parametrize(
    ("masks", "rule"),
    [
        (["0" * 5 + "1" * 36], "serving"),
        (["0011111111", "000000", "0" * 20 + "1" * 9, "010101"], "speculators"),
        (["0" * 40 + "1"], "speculators"),
        (["1" * 34, "0111"], "specforge"),
    ],
)
def test_the_step_equals_the_reference_over_tiles_documents_and_rules(masks, rule, heads) -> None:
    agrees(masks, "eagle3.1" if heads == (4, 2) else "eagle3", Objective(3, step_weights="decay"), rule, heads)
