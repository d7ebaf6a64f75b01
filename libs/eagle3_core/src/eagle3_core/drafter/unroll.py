"""The K steps of every chain, forward and backward, by explicit formulas: what is computed once, what per pair row.

With g the gains, n(x) = x rstd(x) the norm without its gain, and [e; h] the pair that q, k and v read:

    once per key row   hid = fc(aux);  xh = n(hid) g_h;  k0, v0 = rotate(W_h xh + (W_e g_e) n(E(token)))
    per pair row       q (and from step 1 k, v) = rotate(W_h xh + (W_e g_e) n(E(token)))
                       r = fed' + O attend(q);  u = r + D act(G n(r) g_m)
                       fed = u (eagle3) or n(u) g_o (eagle3.1);  xh of the next step = n(fed) g_h
                       fed' is hid in step 0, after that the step before's fed

Everything is linear in W_e x, so the token's share of the projections is made once per token, and since the embedding is
frozen, no gradient of the rows n(E(token)) exists: with the gain folded into the matrix, its gradient comes from that of
the matrix (`Operations.fold_backward`). The same holds for `fc` and the norms of the aux states before it.

A weight's gradient is one product over the rows of all steps. What the head sends back arrives in `d_fed_PH` before the
chains are walked backward; each step adds what its own input passes on.

Shapes: J key rows, P pair rows, E tokens read by queries, H hidden, A query heads x head size, KV the same of key-value
heads, W = A + 2 KV, I inner size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.flat import Matrices
from eagle3_core.drafter.operations import Attention, Operations
from eagle3_core.drafter.rows import RowLayout, Tables


class _Step:
    """The rows of one step: views of the batch's buffers and tables, made once (a view takes the host some microseconds)."""

    def __init__(self, unroll: Unroll, k: int) -> None:
        layout, t, a = unroll.layout, unroll.tables, unroll.heads_width
        z = layout.rows(k)
        self.xh, self.r, self.xr, self.u = unroll.xh_PH[z], unroll.r_PH[z], unroll.xr_PH[z], unroll.u_PH[z]
        self.fed = unroll.fed_PH[z] if unroll.config.norm_output else self.u
        qkv = unroll.qkv_PW[z]
        self.q = qkv[:, :a]
        self.kv = qkv[:, a:] if k else None
        self.made = qkv if k else self.q
        """The columns of q, k and v that the step computes: only q in step 0."""
        self.out, self.gate_up, self.act = unroll.out_PA[z], unroll.gu_P2I[z], unroll.act_PI[z]
        self.rstd_r, self.rstd_u, self.rstd_in = unroll.rstd_r_P[z], unroll.rstd_u_P[z], unroll.rstd_in_P[z]
        self.rotation, self.query = t["rotation_P"][z], t["query_P"][z]
        self.token = t["token_P"][z] if k else None
        self.start = None if k else t["start_P"][z]
        self.before = unroll.fed_PH[layout.rows(k - 1, layout.counts[k])] if k else unroll.hid_JH
        """What the chains were fed; in step 0 the key rows' hidden states, of which `start` picks theirs."""


class Unroll:
    """The chains of one batch."""

    def __init__(
        self, config: DrafterConfig, ops: Operations, weights: Matrices, layout: RowLayout, tables: Tables,
        rotation: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        """`rotation`: cosines and sines [positions, D/2] float32."""
        self.config, self._ops, self._w, self.layout, self.tables = config, ops, weights, layout, tables
        self._rotation = rotation
        c = config
        self.heads_width, self._kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        """A, KV."""
        like, pairs, keys = weights.fc_H3H, layout.pairs, layout.keys

        def rows(count: int, width: int) -> Tensor:
            return like.new_empty(count, width)

        def scalars(count: int) -> Tensor:
            return like.new_empty(count, dtype=torch.float32)

        hidden, inner = c.hidden_size, c.intermediate_size
        self._new, self._scalars = rows, scalars
        self.hid_JH, self._xh_JH, self._xe_JH = rows(keys, hidden), rows(keys, hidden), rows(keys, hidden)
        self.xh_PH, self.r_PH, self.xr_PH = rows(pairs, hidden), rows(pairs, hidden), rows(pairs, hidden)
        self.u_PH, self.out_PA, self.qkv_PW = (
            rows(pairs, hidden),
            rows(pairs, self.heads_width),
            rows(pairs, self.width),
        )
        self.gu_P2I, self.act_PI = rows(pairs, 2 * inner), rows(pairs, inner)
        self._rstd_key_J, self.rstd_in_P = scalars(keys), scalars(pairs)
        self.rstd_r_P, self.rstd_u_P = scalars(pairs), scalars(pairs)
        self.fed_PH = rows(pairs, hidden) if c.norm_output else self.u_PH
        """What each row leaves: the next step's hidden state, and what the head reads."""
        self._steps = [_Step(self, k) for k in range(layout.steps) if layout.counts[k]]

    @property
    def width(self) -> int:
        """W."""
        return self.heads_width + 2 * self._kv

    def forward(self, aux_J3H: Tensor, embedding_VH: Tensor, token_J: Tensor) -> None:
        """Fill `fed_PH` from aux states and the input tokens (verifier ids) of the key rows."""
        self._attention = self._keys(aux_J3H, embedding_VH, token_J)
        for k in range(len(self._steps)):
            self._step(k)

    def _keys(self, aux_J3H: Tensor, embedding_VH: Tensor, token_J: Tensor) -> Attention:
        """What is computed once per key row or token."""
        c, ops, w, eps, t = self.config, self._ops, self._w, self.config.rms_norm_eps, self.tables
        hidden, keys, a = c.hidden_size, self.layout.keys, self.heads_width
        if c.fc_norm:
            self._aux_gain = torch.cat(w.fc_norms)
            self._aux_J3H, fc = self._new(keys, 3 * hidden), ops.fold(w.fc_H3H, self._aux_gain)
            flat = self._aux_J3H.view(-1, hidden)
            ops.norm(aux_J3H.reshape(-1, hidden), None, eps, flat, self._scalars(3 * keys))
        else:
            self._aux_J3H, fc = aux_J3H.to(w.fc_H3H.dtype), w.fc_H3H
        torch.mm(self._aux_J3H, fc.T, out=self.hid_JH)
        ops.norm(self.hid_JH, w.hidden_norm_H, eps, self._xh_JH, self._rstd_key_J)
        ops.norm(embedding_VH, None, eps, self._xe_JH, self._scalars(keys), rows=token_J)
        folded_WH = ops.fold(w.embedding_WH, w.embedding_norm_H)
        self._xe_EH = self._xe_JH.index_select(0, t["token_E"])
        self._token_q_EA = self._xe_EH @ folded_WH[:a].T
        self._token_kv_J2KV = self._xe_JH @ folded_WH[a:].T
        keys_J2KV = self._xh_JH @ w.hidden_WH[a:].T
        kv_heads = c.num_kv_heads
        ops.rotate(keys_J2KV, t["rotation_J"], 2 * kv_heads, kv_heads, self._rotation, add=self._token_kv_J2KV)
        first = self._steps[0]
        torch.index_select(self._xh_JH, 0, _there(first.start), out=first.xh)
        return ops.attention(self.layout, t, self.qkv_PW, keys_J2KV, self.out_PA)

    def _step(self, k: int) -> None:
        c, ops, w, s = self.config, self._ops, self._w, self._steps[k]
        torch.mm(s.xh, w.hidden_WH.T if k else w.hidden_WH[: self.heads_width].T, out=s.made)
        ops.rotate(s.q, s.rotation, c.num_heads, c.num_heads, self._rotation, add=self._token_q_EA, rows=s.query)
        if s.kv is not None:
            ops.rotate(s.kv, s.rotation, 2 * c.num_kv_heads, c.num_kv_heads, self._rotation,
                       add=self._token_kv_J2KV, rows=s.token)  # fmt: skip
        self._attention.forward(k)
        ops.norm(
            s.before, w.mlp_norm_H, c.rms_norm_eps, s.xr, s.rstd_r, add=s.out @ w.out_HA.T, rows=s.start, total=s.r
        )
        torch.mm(s.xr, w.gate_up_2IH.T, out=s.gate_up)
        ops.gate(s.gate_up, s.act)
        self._hand_on(k, s, s.act @ w.down_HI.T)

    def _hand_on(self, k: int, s: _Step, mlp_nH: Tensor) -> None:
        """u, fed, and the next step's normed input."""
        ops, w, eps = self._ops, self._w, self.config.rms_norm_eps
        following = self._steps[k + 1] if k + 1 < len(self._steps) else None
        x_in, rstd_in = (following.xh, following.rstd_in) if following else (s.xh[:0], s.rstd_in[:0])
        if self.config.norm_output:
            ops.norm(s.r, w.norm_H, eps, s.fed, s.rstd_u, add=mlp_nH, total=s.u)
            if following is not None:
                ops.norm(following.before, w.hidden_norm_H, eps, x_in, rstd_in)
        else:
            ops.norm(s.r, w.hidden_norm_H, eps, x_in, rstd_in, add=mlp_nH, total=s.u)

    def backward(self, d_fed_PH: Tensor, g: Matrices, d_norm: Tensor, layer_done: Callable[[], None]) -> None:
        """All weights' gradients but the head's, into `g`; `d_fed_PH` is used up.

        `d_norm`: sums of the last norm's gain, to which eagle3.1 adds what its fed-back states send. `layer_done` is
        called when the gradients of the layer's output and MLP matrices are there and some products are left to do.
        """
        ops, hidden = self._ops, self.config.hidden_size
        self._d_r_PH, self._d_out_PA = torch.empty_like(self.r_PH), torch.empty_like(self.out_PA)
        self._d_qkv_PW = torch.empty_like(self.qkv_PW)
        self._attention.begin_backward(self._d_out_PA, self._d_qkv_PW)
        self._d_mlp_norm, self._d_hidden_norm = ops.gain_sums(hidden), ops.gain_sums(hidden)
        for k in reversed(range(len(self._steps))):
            self._step_backward(k, d_fed_PH, d_norm)
        torch.mm(self._d_r_PH.T, self.out_PA, out=g.out_HA)
        torch.mm(self.gu_P2I.T, self.xr_PH, out=g.gate_up_2IH)
        torch.mm(d_fed_PH.T, self.act_PI, out=g.down_HI)
        layer_done()
        self._keys_backward(g)
        g.mlp_norm_H.copy_(self._d_mlp_norm.sum(0))
        g.hidden_norm_H.copy_(self._d_hidden_norm.sum(0))

    def _step_backward(self, k: int, d_fed_PH: Tensor, d_norm: Tensor) -> None:
        c, ops, w, s, a = self.config, self._ops, self._w, self._steps[k], self.heads_width
        z = self.layout.rows(k)
        d_u, d_r, d_qkv = d_fed_PH[z], self._d_r_PH[z], self._d_qkv_PW[z]
        if c.norm_output:  # d_fed becomes d_u in place
            ops.norm_backward(d_u, s.u, s.rstd_u, w.norm_H, d_u, d_norm)
        ops.gate_backward(s.gate_up, d_u @ w.down_HI)
        ops.norm_backward(s.gate_up @ w.gate_up_2IH, s.r, s.rstd_r, w.mlp_norm_H, d_r, self._d_mlp_norm, residual=d_u)
        torch.mm(d_r, w.out_HA, out=self._d_out_PA[z])
        self._attention.backward(k)
        ops.rotate(d_qkv[:, :a], s.rotation, c.num_heads, c.num_heads, self._rotation, inverse=True)
        if k == 0:
            return
        ops.rotate(d_qkv[:, a:], s.rotation, 2 * c.num_kv_heads, c.num_kv_heads, self._rotation, inverse=True)
        d_before = d_fed_PH[self.layout.rows(k - 1, self.layout.counts[k])]
        ops.norm_backward(d_qkv @ w.hidden_WH, s.before, s.rstd_in, w.hidden_norm_H, d_before, self._d_hidden_norm,
                          residual=d_r, accumulate=True)  # fmt: skip

    def _keys_backward(self, g: Matrices) -> None:
        """Step-0 keys and values, `fc`, and the token's share of the projections."""
        c, ops, w, t, layout, a = self.config, self._ops, self._w, self.tables, self.layout, self.heads_width
        d_kv = self._attention.key_gradient()
        ops.rotate(d_kv, t["rotation_J"], 2 * c.num_kv_heads, c.num_kv_heads, self._rotation, inverse=True)
        first, starts = layout.rows(0), _there(self._steps[0].start)
        d_q0 = self._d_qkv_PW[first, :a]
        d_xh_JH = d_kv @ w.hidden_WH[a:]
        d_xh_JH.index_add_(0, starts, d_q0 @ w.hidden_WH[:a])
        d_hid_JH = torch.zeros_like(self.hid_JH)
        d_hid_JH.index_copy_(0, starts.long(), self._d_r_PH[first])
        ops.norm_backward(d_xh_JH, self.hid_JH, self._rstd_key_J, w.hidden_norm_H, d_hid_JH, self._d_hidden_norm,
                          accumulate=True)  # fmt: skip
        self._fc_backward(d_hid_JH, g)
        later = slice(layout.offsets[1], layout.pairs)
        torch.mm(self._d_qkv_PW[later].T, self.xh_PH[later], out=g.hidden_WH)
        g.hidden_WH[:a].addmm_(d_q0.T, self.xh_PH[first])
        g.hidden_WH[a:].addmm_(d_kv.T, self._xh_JH)
        steps = layout.steps
        d_token_q_EA = ops.gather_sum(self._d_qkv_PW[:, :a], t["query_pair_KE"], steps, None)
        d_token_kv_J2KV = ops.gather_sum(self._d_qkv_PW[:, a:], t["key_pair_KJ"], steps, d_kv)
        d_folded_WH = w.embedding_WH.new_empty(w.embedding_WH.shape)
        torch.mm(d_token_q_EA.T, self._xe_EH, out=d_folded_WH[:a])
        torch.mm(d_token_kv_J2KV.T, self._xe_JH, out=d_folded_WH[a:])
        g.embedding_norm_H.copy_(ops.fold_backward(d_folded_WH, w.embedding_WH, w.embedding_norm_H, g.embedding_WH))

    def _fc_backward(self, d_hid_JH: Tensor, g: Matrices) -> None:
        if not self.config.fc_norm:
            torch.mm(d_hid_JH.T, self._aux_J3H, out=g.fc_H3H)
            return
        d_folded = d_hid_JH.T @ self._aux_J3H
        d_gain = self._ops.fold_backward(d_folded, self._w.fc_H3H, self._aux_gain, g.fc_H3H)
        for mine, part in zip(g.fc_norms, d_gain.split(self.config.hidden_size), strict=True):
            mine.copy_(part)


def _there(rows: Tensor | None) -> Tensor:
    """A table that step 0 has."""
    assert rows is not None
    return rows
