"""Muon: a matrix moves by the orthogonal factor of its momentum, so every direction of it moves equally far.

    m <- mu m + g;    W <- (1 - rate x decay) W - rate x 0.2 sqrt(max(rows, columns)) orthogonal(g + mu m)

(K. Jordan, Muon, 2024; Nesterov form.) `orthogonal` is U V' of the singular value decomposition U S V', approached by five
steps of an odd polynomial that brings all singular values near 1. The factor 0.2 sqrt(max) gives the step the size that
AdamW's has (J. Liu et al., arXiv 2502.16982), so one learning rate serves both: the head and all gains stay with AdamW.

The momentum lies where AdamW's first moment of those weights would, so a checkpoint has the same names and sizes.

Shapes: N elements of all trained weights, [R, C] one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3_core.drafter.flat import HEAD, FlatWeights, Slot
from eagle3_core.train.optim import FlatAdamW

MOMENTUM = 0.95
SIZE = 0.2
ITERATIONS = 5
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
"""x -> a x + b x^3 + c x^5, steep at 0: five rounds bring singular values from 0.01 to 1 into about 0.7 to 1.2."""


def orthogonal(matrix_RC: Tensor) -> Tensor:
    """About U V' of `matrix_RC` = U S V', float32; products in bf16 on a GPU, float32 elsewhere. Zero stays zero."""
    x = matrix_RC.to(torch.bfloat16 if matrix_RC.is_cuda else torch.float32)
    x = x / (torch.linalg.vector_norm(x, dtype=torch.float32) + 1e-30).to(x.dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    a, b, c = POLYNOMIAL
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return (x.T if tall else x).float()


class FlatMuon:
    """The optimizer over flat memory, as `optim.FlatAdamW` is."""

    def __init__(self, flat: FlatWeights, betas: tuple[float, float], weight_decay: float) -> None:
        self._flat, self._decay = flat, weight_decay
        self._matrices = [slot for name, slot in flat.slots.items() if len(slot.shape) == 2 and name != HEAD]
        self._adam = FlatAdamW(flat, betas, weight_decay, _between(self._matrices, len(flat.master_N)))

    @property
    def count(self) -> Tensor:
        """Steps taken."""
        return self._adam.count

    @torch.no_grad()
    def step(self, gradient_N: Tensor, scale: Tensor, rate: float) -> None:
        """One update at learning rate `rate` with `gradient_N` x `scale` (0-dim); the gradient is used up."""
        flat, momentum_N = self._flat, self._adam.moments()["exp_avg"]
        for slot in self._matrices:
            gradient_RC, momentum_RC = slot.of(gradient_N).float() * scale.float(), slot.of(momentum_N)
            momentum_RC.mul_(MOMENTUM).add_(gradient_RC)
            move_RC = orthogonal(gradient_RC.add_(momentum_RC, alpha=MOMENTUM))
            master_RC = slot.of(flat.master_N)
            master_RC.mul_(1.0 - rate * self._decay).sub_(move_RC, alpha=rate * SIZE * max(slot.shape) ** 0.5)
            if flat.compute_N is not flat.master_N:
                slot.of(flat.compute_N).copy_(master_RC)
        self._adam.step(gradient_N, scale, rate)

    def moments(self) -> dict[str, Tensor]:
        """See `FlatAdamW`: of a matrix the first is its momentum, the second unused."""
        return self._adam.moments()

    def begin_at(self, steps: int) -> None:
        """Go on after `steps` steps, with the moments as they are."""
        self._adam.begin_at(steps)


def _between(taken: Sequence[Slot], size: int) -> list[slice]:
    """The ranges of 0 to `size` outside `taken`."""
    ends = [0, *(end for slot in sorted(taken, key=lambda s: s.start) for end in (slot.start, slot.stop)), size]
    return [slice(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True) if start < stop]


OPTIMIZERS = {"adamw": FlatAdamW, "muon": FlatMuon}
"""By the name that a job gives them."""
