"""Uniform noise on aux states, a function of (seed, epoch, sample) alone.

So it does not depend on how samples are packed, on the number of ranks, or on whether the run was interrupted.

Shapes: J rows of a batch that are read (`drafter.rows`), 3H the width of a stored state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from eagle3_core.drafter.rows import lay_out
from eagle3_core.drafter.step import PackedBatch


@dataclass(frozen=True)
class Noise:
    """Adds noise to the aux states [J, 3H] of one batch: uniform in +-`width`, relative to each state's own size."""

    width: float
    keys: tuple[str, ...]
    """What each document's noise is drawn from."""
    lengths: tuple[int, ...]
    """Rows of each document; they sum to J."""

    @classmethod
    def on(cls, batch: PackedBatch, *, width: float, place: str) -> Noise:
        """The noise of `batch` at `place` (seed and epoch)."""
        layout = batch.layout or lay_out(batch.plan, batch.offsets)
        rows = np.diff(np.searchsorted(layout.host["position_J"], batch.offsets))
        return cls(width, tuple(f"{place}/{sample}" for sample in batch.samples), tuple(rows.tolist()))

    def __call__(self, aux_J3H: Tensor) -> Tensor:
        """The noisy states, in the dtype of the given ones. Each of a position's three states has its own size."""
        state = aux_J3H.float().unflatten(-1, (3, -1))
        drawn = torch.cat([self._draw(key, rows, state) for key, rows in zip(self.keys, self.lengths, strict=True)])
        size = state.square().mean(-1, keepdim=True).sqrt()
        return (state + self.width * size * drawn).flatten(-2).to(aux_J3H.dtype)

    def _draw(self, key: str, rows: int, like: Tensor) -> Tensor:
        generator = torch.Generator(like.device)
        generator.manual_seed(int.from_bytes(blake3(key.encode()).digest(7), "big"))
        return torch.rand((rows, *like.shape[1:]), generator=generator, device=like.device) * 2.0 - 1.0
