"""Uniform noise on aux states, a function of (seed, epoch, sample) alone.

So it does not depend on how samples are packed or sliced, on the number of ranks, or on whether the run was interrupted.

Shapes: T tokens of a document, 3H the width of a stored state.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from blake3 import blake3
from torch import Tensor

from eagle3_core.drafter.step import PackedBatch


def noisy(batch: PackedBatch, *, width: float, place: str) -> PackedBatch:
    """`batch` with noise on its aux states, in their dtype; `place` names seed and epoch.

    Each of a position's three states gets noise uniform in +-`width` times its own root mean square.
    """
    if width == 0:
        return batch
    lengths = (batch.offsets[1:] - batch.offsets[:-1]).tolist()
    documents = zip(batch.aux_T3H.split(lengths), batch.samples, strict=True)
    return replace(batch, aux_T3H=torch.cat([_shaken(aux, width, f"{place}/{sample}") for aux, sample in documents]))


def _shaken(aux_T3H: Tensor, width: float, key: str) -> Tensor:
    generator = torch.Generator(aux_T3H.device)
    generator.manual_seed(int.from_bytes(blake3(key.encode()).digest(7), "big"))
    state = aux_T3H.float().unflatten(-1, (3, -1))
    drawn = torch.rand(state.shape, generator=generator, device=aux_T3H.device) * 2.0 - 1.0
    size = state.square().mean(-1, keepdim=True).sqrt()
    return (state + width * size * drawn).flatten(-2).to(aux_T3H.dtype)
