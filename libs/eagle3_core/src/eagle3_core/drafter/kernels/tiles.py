"""Tile sizes by device and shape, and which tiles of query rows see which block of keys.

64 x 64 tiles with 4 warps and tensor-map loads were the fastest of some fifty shapes tried on an H200 at head size 128;
128 rows are 2 to 5 times slower in the key gradient, where four products' accumulators do not fit. The queries' gradient
alone gains by wider programs, 8 warps and three stages over 32 rows of four heads or 64 of two, which share their keys: a
sixth at 8,192 tokens, a tenth at 2,048.

Shapes: P query rows, J keys, NT tiles of BM query rows (none spans two steps), NB blocks of BN keys.
"""

from __future__ import annotations

import math
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
    query_heads: int
    """Query heads of a group that a program of the queries' gradient takes, each with `query_rows`."""
    query_rows: int
    query_warps: int
    query_stages: int
    key_stages: int
    own_rows: int
    programs: int
    """Programs of the key gradient from which on cutting them finer gains nothing."""
    tensor_maps: bool
    """Load tiles through the copy engine (compute capability 9.0 and 10.x)."""


def tile_sizes(head_dim: int, group: int, itemsize: int, device: torch.device) -> TileSizes:
    """Sizes that fit the device's shared memory, for groups of `group` query heads.

    Tensor maps and three stages were run on an H200. Devices without the copy engine, or with less shared memory (A100:
    163 KiB, SM120: 99 KiB a block), load through pointers with as many stages as fit; that choice could not be run on
    such a device, only its code path elsewhere.
    """
    if device.type != "cuda":  # the interpreter
        return TileSizes(16, 16, 1, 1, math.gcd(group, 2), 16, 1, 1, 1, 16, 3, False)
    properties = torch.cuda.get_device_properties(device)
    shared = int(properties.shared_memory_per_block_optin)
    side = 64 if head_dim * itemsize <= 256 else 32
    tile = side * head_dim * itemsize

    def stages(resident: int, per_stage: int, most: int) -> int:
        return max(1, min(most, (shared - 8192 - resident * tile) // (per_stage * tile)))

    heads, wide = math.gcd(group, 4), stages(4, 2, 3)  # a wide program holds two tiles of queries and of d_out each
    queries = (heads, 2 * side // heads, 8, wide) if heads > 1 and wide == 3 else (1, side, 4, stages(2, 2, 2))
    return TileSizes(
        side, side, 4, stages(1, 2, 3), *queries, stages(3, 2, 2), 32,
        programs=32 * properties.multi_processor_count,
        tensor_maps=torch.cuda.get_device_capability(device)[0] in (9, 10),
    )  # fmt: skip


def group_parts(group: int, programs: int, wanted: int) -> int:
    """Into how many parts to cut a group of query heads so that `programs` become `wanted`, as far as halving goes."""
    parts = 1
    while programs * parts < wanted and group % (2 * parts) == 0:
        parts *= 2
    return parts


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
