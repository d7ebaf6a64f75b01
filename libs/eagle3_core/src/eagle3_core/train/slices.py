"""A pass in slices of its chains, where the whole does not fit into memory.

Beyond step 0 no chain reads another's output, so a slice of the chains over the same keys is a pass of its own; numerators,
denominators, counts and gradients add up to the whole's. Slices are runs of neighbouring chains with about as many pairs
each, so that most of them need only a part of the keys.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from eagle3_core.drafter.chains import ChainPlan
from eagle3_core.drafter.step import PackedBatch


def sliced(batch: PackedBatch, count: int) -> list[PackedBatch]:
    """`batch` in at most `count` slices."""
    if count <= 1:
        return [batch]
    ends = np.cumsum(batch.plan.depth_M)
    bounds = np.searchsorted(ends, ends[-1] * np.arange(count + 1) / count, side="left")
    bounds[-1] = len(ends)
    cuts = np.unique(bounds)
    return [
        replace(batch, plan=_part(batch.plan, batch.offsets, a, b), layout=None) for a, b in pairwise(cuts.tolist())
    ]


def _part(plan: ChainPlan, offsets: np.ndarray, first: int, stop: int) -> ChainPlan:
    """Chains `first` to `stop` of a plan."""
    start_M, row_offsets = plan.start_M[first:stop], np.clip(plan.row_offsets, first, stop) - first
    last = start_M[np.maximum(row_offsets[1:] - 1, 0)]
    key_stops = np.where(np.diff(row_offsets) > 0, last + 1, np.asarray(offsets[:-1]))
    return ChainPlan(
        start_M, plan.valid_MK[first:stop], plan.depth_M[first:stop], row_offsets.astype(np.int64), key_stops.astype(np.int64)
    )  # fmt: skip
