"""The attention of one batch on a GPU: launches of the kernels in `kernels.attend` over one set of buffers.

Shapes: P pair rows, J key rows, A query heads x head size, KV key-value heads x head size, W = A + 2 KV.
"""

# Triton takes launch options (num_warps, num_stages) and compile-time values that its types do not know.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.kernels import attend
from eagle3_core.drafter.kernels.tiles import TileSizes, group_parts, key_tiles
from eagle3_core.drafter.rows import RowLayout, Tables

LOG2_E = 1.4426950408889634


class TritonAttention:
    """`operations.Attention` in Triton."""

    def __init__(
        self, config: DrafterConfig, layout: RowLayout, tables: Tables, queries_PW: Tensor, keys_J2KV: Tensor,
        out_PA: Tensor, sizes: TileSizes,
    ) -> None:  # fmt: skip
        self._c, self._layout, self._t, self._sizes = config, layout, tables, sizes
        self._queries_PW, self._keys_J2KV, self._out_PA = queries_PW, keys_J2KV, out_PA
        a, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._shape: dict[str, Any] = {
            "W": a + 2 * kv, "A": a, "KV": kv, "G": config.num_heads // config.num_kv_heads, "D": config.head_dim,
        }  # fmt: skip
        self._dot = {"DOT": "ieee" if queries_PW.dtype == torch.float32 else "tf32"}
        self._scale = config.head_dim**-0.5
        self._log_sum = queries_PW.new_empty(config.num_heads * layout.pairs, dtype=torch.float32)
        self._keys_map = self._map(keys_J2KV, sizes.keys)

    def _map(self, x: Tensor, rows: int) -> Any:
        """A descriptor of [rows, D] tiles of x, or x itself where the copy engine is not used."""
        return TensorDescriptor.from_tensor(x, [rows, self._c.head_dim]) if self._sizes.tensor_maps else x

    def forward(self, k: int) -> None:
        """See `Attention.forward`."""
        t, s, count = self._t, self._sizes, self._layout.counts[k]
        attend.forward_kernel[(triton.cdiv(count, s.rows), self._c.num_heads)](
            self._queries_PW, self._keys_J2KV, self._keys_map, self._out_PA, self._log_sum, t["start_P"], t["first_P"],
            t["offset_K1"], k, count, self._layout.keys, self._layout.pairs, self._scale * LOG2_E, **self._shape,
            **self._dot, BM=s.rows, BN=s.keys, TMA=s.tensor_maps, num_warps=s.warps, num_stages=s.forward_stages,
        )  # fmt: skip

    def begin_backward(self, d_out_PA: Tensor, d_queries_PW: Tensor) -> None:
        """See `Attention.begin_backward`."""
        self._d_out_PA, self._d_queries_PW = d_out_PA, d_queries_PW
        self._delta = torch.empty_like(self._log_sum)

    def backward(self, k: int) -> None:
        """See `Attention.backward`."""
        t, s, count, pairs = self._t, self._sizes, self._layout.counts[k], self._layout.pairs
        attend.query_gradient_kernel[(triton.cdiv(count, s.query_rows), self._c.num_heads // s.query_heads)](
            self._queries_PW, self._keys_J2KV, self._keys_map, self._out_PA, self._d_out_PA, self._log_sum, self._delta,
            self._d_queries_PW, t["start_P"], t["first_P"], t["offset_K1"], k, count, self._layout.keys, pairs,
            self._scale, self._scale * LOG2_E, **self._shape, **self._dot, HEADS=s.query_heads, BM=s.query_rows,
            BN=s.keys, TMA=s.tensor_maps, num_warps=s.query_warps, num_stages=s.query_stages,
        )  # fmt: skip
        if k == 0:
            return
        attend.own_gradient_kernel[(triton.cdiv(count, s.own_rows), self._c.num_kv_heads)](
            self._queries_PW, self._d_out_PA, self._log_sum, self._delta, self._d_queries_PW, t["offset_K1"], k, count,
            pairs, self._scale, self._scale * LOG2_E, STEPS=self._layout.steps, **self._shape, BM=s.own_rows, num_warps=4,
        )  # fmt: skip

    def key_gradient(self) -> Tensor:
        """See `Attention.key_gradient`."""
        t, s, layout = self._t, self._sizes, self._layout
        lists = key_tiles(layout, s.rows, s.keys, self._keys_J2KV.device)
        heads, group = self._c.num_kv_heads, self._shape["G"]
        parts = group_parts(group, len(lists.wholes) * heads, s.programs)
        keys = self._keys_J2KV
        d_keys = keys.new_empty(parts, *keys.shape, dtype=keys.dtype if parts == 1 else torch.float32)
        attend.key_gradient_kernel[(len(lists.wholes), heads, parts)](
            self._queries_PW, self._map(self._queries_PW, s.rows), keys, self._d_out_PA, self._map(self._d_out_PA, s.rows),
            self._log_sum, self._delta, t["start_P"], t["first_P"], lists.row, lists.end, lists.whole, lists.wholes,
            lists.part, lists.parts, len(lists.row), d_keys, layout.keys, layout.pairs, self._scale,
            self._scale * LOG2_E, **self._shape, **self._dot, HEADS=group // parts, BM=s.rows, BN=s.keys,
            TMA=s.tensor_maps, num_warps=s.warps, num_stages=s.key_stages,
        )  # fmt: skip
        return d_keys[0] if parts == 1 else d_keys.sum(0).to(keys.dtype)
