"""Tile sizes by device and shape, and which tiles of query rows see which block of keys.

64 x 64 tiles with 4 warps and tensor-map loads were the fastest of some thirty shapes tried on an H200 at head size 128;
128 rows are 2 to 5 times slower in the key gradient, where four products' accumulators do not fit.

Shapes: P query rows, J keys, NT tiles of BM query rows (none spans two steps), NB blocks of BN keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle3_core.drafter.rows import RowLayout


@dataclass(frozen=True)
class TileSizes:
    """How the attention's kernels are cut."""

    rows: int
    keys: int
    warps: int
    forward_stages: int
    query_stages: int
    key_stages: int
    own_rows: int
    tensor_maps: bool
    """Load tiles through the copy engine (compute capability 9.0 and 10.x)."""


def tile_sizes(head_dim: int, itemsize: int, device: torch.device) -> TileSizes:
    """Sizes that fit the device's shared memory.

    Tensor maps and three stages were run on an H200. Devices without the copy engine, or with less shared memory (A100:
    163 KiB, SM120: 99 KiB a block), load through pointers with as many stages as fit; that choice could not be run on
    such a device, only its code path elsewhere.
    """
    if device.type != "cuda":  # the interpreter
        return TileSizes(16, 16, 1, 1, 1, 1, 16, False)
    properties = torch.cuda.get_device_properties(device)
    shared = int(properties.shared_memory_per_block_optin)
    side = 64 if head_dim * itemsize <= 256 else 32
    tile = side * head_dim * itemsize

    def stages(resident: int, per_stage: int, most: int) -> int:
        return max(1, min(most, (shared - 8192 - resident * tile) // (per_stage * tile)))

    return TileSizes(
        side, side, 4, stages(1, 2, 3), stages(2, 2, 2), stages(3, 2, 2), 32,
        tensor_maps=torch.cuda.get_device_capability(device)[0] in (9, 10),
    )  # fmt: skip


@dataclass(frozen=True)
class KeyTiles:
    """For each block of keys, the tiles of query rows that see it."""

    row: Tensor
    """[NT]: first row of a tile."""
    end: Tensor
    """[NT]: the row behind the last of the tile's step."""
    whole: Tensor
    """[NB, NT] tiles all of whose rows see all of the block, then others."""
    wholes: Tensor
    """[NB]."""
    part: Tensor
    """[NB, NT] tiles that see some of it, then others."""
    parts: Tensor
    """[NB]."""


def key_tiles(layout: RowLayout, rows: int, keys: int, device: torch.device) -> KeyTiles:
    """The lists for tiles of `rows` query rows and blocks of `keys` keys."""
    start_P, first_P = layout.host["start_P"], layout.host["first_P"]
    offsets, counts = np.asarray(layout.offsets), layout.counts
    row = np.concatenate([np.arange(offsets[k], offsets[k + 1], rows) for k in range(layout.steps)])
    end = np.concatenate([np.full(-(-counts[k] // rows), offsets[k + 1]) for k in range(layout.steps)])
    host = torch.from_numpy(
        np.stack([row, end, *(f.reduceat(x, row) for x in (start_P, first_P) for f in (np.minimum, np.maximum))])
        .astype(np.int32)
    )  # fmt: skip
    if device.type == "cuda":
        host = host.pin_memory()
    row_NT, end_NT, start_low, start_high, first_low, first_high = host.to(device, non_blocking=True)
    block = (torch.arange(-(-layout.keys // keys), device=device, dtype=torch.int32) * keys)[:, None]
    seen = (start_high >= block) & (first_low < block + keys)
    whole = seen & (start_low >= block + keys - 1) & (first_high <= block) & (row_NT + rows <= end_NT)
    part = seen & ~whole
    lists = [x.to(torch.uint8).argsort(dim=1, descending=True, stable=True).int() for x in (whole, part)]
    wholes, parts = (x.sum(1, dtype=torch.int32) for x in (whole, part))
    return KeyTiles(row_NT, end_NT, lists[0], wholes, lists[1], parts)
