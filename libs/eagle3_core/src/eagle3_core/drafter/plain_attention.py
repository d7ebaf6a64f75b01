"""Attention of the step in torch alone: document by document, slices of rows, shares kept where they are few.

A row's keys are those of its document up to its start and its chain's own keys of earlier steps. Both parts share one
softmax; with its log-sum known, each part's gradient is that of an ordinary attention (delta = sum(d_out x out)), so
forward and backward treat the two parts side by side.

Shapes: n rows of one document and step, L its keys, G = Q / KV heads, K key-value heads, D head size; i steps 1..k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.rows import RowLayout

SCORE_ELEMENTS = 1 << 26
"""Attention scores (heads x rows x keys) computed at once."""
KEPT_ELEMENTS = 1 << 28
"""Shares kept for the backward pass; what is more is made again there."""


@dataclass
class _Slice:
    """Rows of one step that are attended together."""

    rows: Tensor | slice
    """Pair rows."""
    own_rows: list[Tensor | slice]
    """The same chains' rows in steps 1..k."""
    keys: slice
    hidden_nL: Tensor
    """Which of the keys lie behind the row's start."""
    kept: tuple[Tensor, Tensor | None] | None = None
    """Shares of the two parts."""


class PlainAttention:
    """`operations.Attention` in torch."""

    def __init__(
        self, config: DrafterConfig, layout: RowLayout, queries_PW: Tensor, keys_J2KV: Tensor, out_PA: Tensor
    ) -> None:
        self._c, self._layout, self._out_PA = config, layout, out_PA
        self._a, self._kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._group = config.num_heads // config.num_kv_heads
        self._scale = config.head_dim**-0.5
        self._queries_PW, self._keys_J2KV = queries_PW, keys_J2KV
        self._log_sum_PQ = queries_PW.new_empty(layout.pairs, config.num_heads, dtype=torch.float32)
        self._slices: dict[int, list[_Slice]] = {}
        self._room = KEPT_ELEMENTS

    def forward(self, k: int) -> None:
        """See `Attention.forward`."""
        self._slices[k] = list(self._plan(k))
        for part in self._slices[k]:
            keys_KLD, values_KLD = self._keys(part.keys)
            q_KGnD = self._heads(self._queries_PW[part.rows, : self._a]) * self._scale
            scores = (q_KGnD.flatten(1, 2) @ keys_KLD.transpose(1, 2)).view(*q_KGnD.shape[:3], -1).float()
            scores.masked_fill_(part.hidden_nL, float("-inf"))
            own = self._own_scores(q_KGnD, part)
            joint = scores if own is None else torch.cat([scores, own], -1)
            log_sum = joint.logsumexp(-1, keepdim=True)
            shares = (joint - log_sum).exp_().to(q_KGnD.dtype)
            common, own_shares = shares[..., : keys_KLD.shape[1]], shares[..., keys_KLD.shape[1] :]
            out = (common.flatten(1, 2) @ values_KLD).view(q_KGnD.shape)
            for i, rows in enumerate(part.own_rows):
                out.addcmul_(own_shares[..., i, None], self._own(rows, 1)[:, None])
            self._out_PA[part.rows] = out.permute(2, 0, 1, 3).flatten(1)
            self._log_sum_PQ[part.rows] = log_sum[..., 0].permute(2, 0, 1).flatten(1)
            if shares.numel() <= self._room:
                self._room -= shares.numel()
                part.kept = common, own_shares if part.own_rows else None

    def begin_backward(self, d_out_PA: Tensor, d_queries_PW: Tensor) -> None:
        """See `Attention.begin_backward`."""
        self._d_out_PA, self._d_queries_PW = d_out_PA, d_queries_PW
        self._d_keys_J2KV = torch.zeros_like(self._keys_J2KV, dtype=torch.float32)
        # What later steps send to a chain's own keys; step k reads it when its turn comes.
        self._d_own_P2KV = torch.zeros(len(d_queries_PW), 2 * self._kv, device=d_out_PA.device)

    def backward(self, k: int) -> None:
        """See `Attention.backward`."""
        for part in self._slices.pop(k):
            keys_KLD, values_KLD = self._keys(part.keys)
            q_KGnD = self._heads(self._queries_PW[part.rows, : self._a])
            d_KGnD, out_KGnD = self._heads(self._d_out_PA[part.rows]), self._heads(self._out_PA[part.rows])
            delta = torch.linalg.vecdot(d_KGnD.float(), out_KGnD.float())[..., None]
            shares, own = part.kept if part.kept is not None else self._shares_again(part, q_KGnD, keys_KLD)
            d_flat, shares_flat = d_KGnD.flatten(1, 2), shares.flatten(1, 2)
            d_scores = (d_flat @ values_KLD.transpose(1, 2)).view(shares.shape)
            d_scores = ((d_scores - delta) * shares * self._scale).to(q_KGnD.dtype).flatten(1, 2)
            d_q = (d_scores @ keys_KLD).view(q_KGnD.shape)
            self._add(self._d_keys_J2KV, part.keys, 0, d_scores.transpose(1, 2) @ q_KGnD.flatten(1, 2))
            self._add(self._d_keys_J2KV, part.keys, 1, shares_flat.transpose(1, 2) @ d_flat)
            if own is not None:
                self._own_backward(part, own, q_KGnD, d_KGnD, delta, d_q)
            self._d_queries_PW[part.rows, : self._a] = d_q.permute(2, 0, 1, 3).flatten(1)
        if k:
            z = self._layout.rows(k)
            self._d_queries_PW[z, self._a :] = self._d_own_P2KV[z].to(self._d_queries_PW.dtype)

    def key_gradient(self) -> Tensor:
        """See `Attention.key_gradient`."""
        return self._d_keys_J2KV.to(self._keys_J2KV.dtype)

    def _plan(self, k: int) -> list[_Slice]:
        """Step `k` in slices: one document each, or less where its scores are many."""
        layout, device = self._layout, self._queries_PW.device
        start_P = layout.host["start_P"]
        found: list[_Slice] = []
        for chains, (first, stop) in zip(layout.chains_of, layout.key_range_of, strict=True):
            alive = chains[: np.searchsorted(chains, layout.counts[k])]
            most = max(1, SCORE_ELEMENTS // (self._c.num_heads * (stop - first)))
            for at in range(0, len(alive), most):
                piece = alive[at : at + most]
                start = torch.from_numpy(start_P[piece + layout.offsets[k]].astype(np.int64)).to(device)
                stop_here = int(start_P[piece].max()) + 1
                hidden = torch.arange(first, stop_here, device=device) > start[:, None]
                rows = [_index(piece + layout.offsets[i], device) for i in (*range(1, k + 1),)]
                found.append(_Slice(_index(piece + layout.offsets[k], device), rows, slice(first, stop_here), hidden))
        return found

    def _heads(self, x_nA: Tensor) -> Tensor:
        """[K, G, n, D]."""
        return x_nA.unflatten(-1, (self._c.num_kv_heads, self._group, self._c.head_dim)).permute(1, 2, 0, 3)

    def _keys(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Two [K, L, D]: step-0 keys and values."""
        both = self._keys_J2KV[rows].unflatten(-1, (2, self._c.num_kv_heads, self._c.head_dim))
        return both[:, 0].transpose(0, 1), both[:, 1].transpose(0, 1)

    def _own(self, rows: Tensor | slice, which: int) -> Tensor:
        """[K, n, D]: a step's own keys (0) or values (1) of the chains at `rows`."""
        first = self._a + which * self._kv
        own_nKV = self._queries_PW[rows, first : first + self._kv]
        return own_nKV.unflatten(-1, (self._c.num_kv_heads, -1)).transpose(0, 1)

    def _own_scores(self, q_KGnD: Tensor, part: _Slice) -> Tensor | None:
        """[K, G, n, i] of already scaled queries."""
        if not part.own_rows:
            return None
        scores = [torch.linalg.vecdot(q_KGnD, self._own(rows, 0)[:, None]) for rows in part.own_rows]
        return torch.stack(scores, -1).float()

    def _shares_again(self, part: _Slice, q_KGnD: Tensor, keys_KLD: Tensor) -> tuple[Tensor, Tensor | None]:
        q = q_KGnD * self._scale
        log_sum = (
            self._log_sum_PQ[part.rows].unflatten(-1, (self._c.num_kv_heads, self._group)).permute(1, 2, 0)[..., None]
        )
        scores = (q.flatten(1, 2) @ keys_KLD.transpose(1, 2)).view(*q.shape[:3], -1).float()
        shares = (scores.masked_fill_(part.hidden_nL, float("-inf")) - log_sum).exp_().to(q.dtype)
        own = self._own_scores(q, part)
        return shares, None if own is None else (own - log_sum).exp_().to(q.dtype)

    def _own_backward(
        self, part: _Slice, own: Tensor, q_KGnD: Tensor, d_KGnD: Tensor, delta: Tensor, d_q: Tensor
    ) -> None:
        """The chains' own keys: gradients of their keys and values, and their part of the queries'."""
        for i, rows in enumerate(part.own_rows):
            key_KnD, value_KnD, share = self._own(rows, 0), self._own(rows, 1), own[..., i, None]
            d_score = (torch.linalg.vecdot(d_KGnD, value_KnD[:, None])[..., None] - delta) * share * self._scale
            d_q += d_score * key_KnD[:, None]
            self._add(self._d_own_P2KV, rows, 0, (d_score * q_KGnD).sum(1))
            self._add(self._d_own_P2KV, rows, 1, (share * d_KGnD).sum(1))

    def _add(self, total: Tensor, rows: Tensor | slice, which: int, part_KnD: Tensor) -> None:
        """Add to a gradient of keys (0) or values (1); `rows` never holds a row twice."""
        columns = slice(which * self._kv, (which + 1) * self._kv)
        total[rows, columns] += part_KnD.transpose(0, 1).flatten(1).to(total.dtype)


def _index(rows: np.ndarray, device: torch.device) -> Tensor | slice:
    """A slice where the rows follow one another, which copies nothing."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64)).to(device)
