"""What a training step does besides matrix products, as an interface with two implementations.

`drafter.plain` is torch on any device. `drafter.kernels` is Triton on a GPU: fused, one pass over memory each. Which one
runs is decided here, by what the device and the shapes allow; the order of the work (`drafter.unroll`) is the same.

All row buffers are contiguous along their last dimension, may be views of wider ones, and are written in place. Sums are
made in float32 whatever the buffers' dtype. `rows` arguments are index tables of `drafter.rows`.

Shapes: n rows of a call, H hidden size, I inner size, Q query and KV key-value heads, D head size, A = Q D, P pair rows,
J key rows, Vd draft vocabulary, U labels and R learning rows of a piece.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.losses import LossName
from eagle3_core.drafter.rows import RowLayout, Tables

KERNEL_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True)
class Scores:
    """What the loss of a learning row needs of its logits, and what the gradient needs again; [R] each."""

    distance: Tensor
    """float32."""
    overlap: Tensor
    """float32 alpha = sum min(p, q); 1 where nothing reads it."""
    below: Tensor
    """float32: the drafter's probability on tokens that it rates lower than the verifier does."""
    best: Tensor
    """i64: the drafter's best draft id."""
    student_log_sum: Tensor
    """float32 log sum exp of the drafter's logits."""
    teacher_log_sum: Tensor
    """float32, the verifier's."""


class Attention(Protocol):
    """The attention of one batch, over its buffers.

    Row (p, k) sees the step-0 keys of its document up to p, and the keys that its own chain wrote in steps 1..k.
    `queries_PW` holds q, k and v of pair rows side by side (of step 0 only q), `keys_J2KV` step-0 keys and values.
    """

    def forward(self, k: int) -> None:
        """Fill `out_PA` for the rows of step `k`."""
        ...

    def begin_backward(self, d_out_PA: Tensor, d_queries_PW: Tensor) -> None:
        """Where the gradients of `out_PA` will come and those of `queries_PW` go."""
        ...

    def backward(self, k: int) -> None:
        """Write step `k`'s gradient of `queries_PW` (as rotated). Steps come in falling order, with `d_out_PA` filled."""
        ...

    def key_gradient(self) -> Tensor:
        """[J, 2KV] gradient of the step-0 keys (as rotated) and values, after the last `backward`."""
        ...


class Operations(Protocol):
    """The passes over memory between two products."""

    def norm(
        self, x: Tensor, gain_H: Tensor | None, eps: float, out: Tensor, rstd: Tensor, *, add: Tensor | None = None,
        rows: Tensor | None = None, total: Tensor | None = None,
    ) -> None:  # fmt: skip
        """t = x[rows] + add, kept in `total`; out = t rstd gain for the first len(out) rows, rstd kept."""
        ...

    def norm_backward(
        self, d: Tensor, x: Tensor, rstd: Tensor, gain_H: Tensor, out: Tensor, d_gain: Tensor, *,
        rows: Tensor | None = None, residual: Tensor | None = None, accumulate: bool = False,
    ) -> None:  # fmt: skip
        """out[rows] (+)= gradient of norm(x[rows]) (+ residual); the gain's gradient is added to `d_gain`."""
        ...

    def gain_sums(self, hidden: int) -> Tensor:
        """[any, H] float32 zeros, for `norm_backward` to add to; their sum over rows is the gain's gradient."""
        ...

    def rotate(
        self, x: Tensor, positions: Tensor, heads: int, rotated: int, tables: tuple[Tensor, Tensor], *,
        add: Tensor | None = None, rows: Tensor | None = None, inverse: bool = False,
    ) -> None:  # fmt: skip
        """x [n, heads D] becomes x + add[rows], its first `rotated` heads rotated to `positions` (back, if `inverse`)."""
        ...

    def gate(self, gate_up_n2I: Tensor, out_nI: Tensor) -> None:
        """out = activation(gate) up."""
        ...

    def gate_backward(self, gate_up_n2I: Tensor, d_out_nI: Tensor) -> None:
        """`gate_up_n2I` becomes its own gradient."""
        ...

    def fold(self, matrix: Tensor, gain: Tensor) -> Tensor:
        """matrix [r, c] x gain [c]: a norm's gain moved into the matrix behind it."""
        ...

    def fold_backward(self, d_folded: Tensor, matrix: Tensor, gain: Tensor, d_matrix: Tensor) -> Tensor:
        """Writes `d_matrix`, returns the gain's gradient [c] float32. No gradient of the rows is ever needed."""
        ...

    def gather_sum(self, x: Tensor, pair_Kn: Tensor, steps: int, first: Tensor | None) -> Tensor:
        """[n, c]: sum over the steps of x at the pair rows `pair_Kn` (-1: none), plus `first` [n, c]."""
        ...

    def scale(self, x: Tensor, factor: Tensor, out: Tensor) -> None:
        """out = x factor, a float32 scalar on the device, rounded once."""
        ...

    def score(
        self, logits_RVd: Tensor, teacher_UVd: Tensor, label_R: Tensor, first_label: int, loss: LossName, *, overlap: bool
    ) -> Scores:  # fmt: skip
        """Distances of learning rows to their labels' distributions; both sides are logits."""
        ...

    def score_backward(
        self, logits_RVd: Tensor, teacher_UVd: Tensor, label_R: Tensor, first_label: int, loss: LossName, scores: Scores,
        d_distance_R: Tensor, d_overlap_R: Tensor | None,
    ) -> None:  # fmt: skip
        """`logits_RVd` becomes its own gradient."""
        ...

    def attention(
        self, layout: RowLayout, tables: Tables, queries_PW: Tensor, keys_J2KV: Tensor, out_PA: Tensor
    ) -> Attention:
        """The attention of one batch over its buffers."""
        ...


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels can run on `device`: a CUDA GPU from Ampere (8.0) on, and Triton beside torch."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and importlib.util.find_spec("triton") is not None
    )


def operations_for(config: DrafterConfig, device: torch.device) -> Operations:
    """The fastest operations that this device and these shapes allow."""
    if has_kernels(device) and config.hidden_act in KERNEL_ACTIVATIONS:
        from eagle3_core.drafter.kernels.operations import TritonOperations

        return TritonOperations(config, device)
    from eagle3_core.drafter.plain import PlainOperations

    return PlainOperations(config)
