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

import torch
from torch import Tensor

from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.flat import Matrices
from eagle3_core.drafter.operations import Attention, Operations
from eagle3_core.drafter.rows import RowLayout, Tables


class Unroll:
    """The chains of one batch."""

    def __init__(
        self, config: DrafterConfig, ops: Operations, weights: Matrices, layout: RowLayout, tables: Tables,
        rotation: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        """`rotation`: cosines and sines [positions, D/2] float32."""
        self.config, self._ops, self._w, self._layout, self._tables = config, ops, weights, layout, tables
        self._rotation = rotation
        c = config
        self._a, self._kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        like, pairs, keys = weights.fc_H3H, layout.pairs, layout.keys

        def rows(count: int, width: int) -> Tensor:
            return like.new_empty(count, width)

        def scalars(count: int) -> Tensor:
            return like.new_empty(count, dtype=torch.float32)

        hidden, inner = c.hidden_size, c.intermediate_size
        self._new, self._scalars = rows, scalars
        self._hid_JH, self._xh_JH, self._xe_JH = rows(keys, hidden), rows(keys, hidden), rows(keys, hidden)
        self._xh_PH, self._r_PH, self._xr_PH = rows(pairs, hidden), rows(pairs, hidden), rows(pairs, hidden)
        self._u_PH, self._out_PA, self._qkv_PW = rows(pairs, hidden), rows(pairs, self._a), rows(pairs, self.width)
        self._gu_P2I, self._act_PI = rows(pairs, 2 * inner), rows(pairs, inner)
        self._rstd_key_J, self._rstd_in_P = scalars(keys), scalars(pairs)
        self._rstd_r_P, self._rstd_u_P = scalars(pairs), scalars(pairs)
        self.fed_PH = rows(pairs, hidden) if c.norm_output else self._u_PH
        """What each row leaves: the next step's hidden state, and what the head reads."""

    @property
    def width(self) -> int:
        """W."""
        return self._a + 2 * self._kv

    def forward(self, aux_J3H: Tensor, embedding_VH: Tensor, token_J: Tensor) -> None:
        """Fill `fed_PH` from aux states and the input tokens (verifier ids) of the key rows."""
        attention = self._keys(aux_J3H, embedding_VH, token_J)
        for k in range(self._layout.steps):
            if self._layout.counts[k]:
                self._step(k, attention)
        self._attention = attention

    def _keys(self, aux_J3H: Tensor, embedding_VH: Tensor, token_J: Tensor) -> Attention:
        """What is computed once per key row or token."""
        c, ops, w, eps, t = self.config, self._ops, self._w, self.config.rms_norm_eps, self._tables
        hidden, keys, a = c.hidden_size, self._layout.keys, self._a
        if c.fc_norm:
            self._aux_gain = torch.cat(w.fc_norms)
            self._aux_J3H, fc = self._new(keys, 3 * hidden), ops.fold(w.fc_H3H, self._aux_gain)
            flat = self._aux_J3H.view(-1, hidden)
            ops.norm(aux_J3H.reshape(-1, hidden), None, eps, flat, self._scalars(3 * keys))
        else:
            self._aux_J3H, fc = aux_J3H.to(w.fc_H3H.dtype), w.fc_H3H
        torch.mm(self._aux_J3H, fc.T, out=self._hid_JH)
        ops.norm(self._hid_JH, w.hidden_norm_H, eps, self._xh_JH, self._rstd_key_J)
        ops.norm(embedding_VH, None, eps, self._xe_JH, self._scalars(keys), rows=token_J)
        folded_WH = ops.fold(w.embedding_WH, w.embedding_norm_H)
        self._xe_EH = self._xe_JH.index_select(0, t["token_E"])
        self._token_q_EA = self._xe_EH @ folded_WH[:a].T
        self._token_kv_J2KV = self._xe_JH @ folded_WH[a:].T
        keys_J2KV = self._xh_JH @ w.hidden_WH[a:].T
        kv_heads = c.num_kv_heads
        ops.rotate(keys_J2KV, t["rotation_J"], 2 * kv_heads, kv_heads, self._rotation, add=self._token_kv_J2KV)
        torch.index_select(self._xh_JH, 0, t["start_P"][self._layout.rows(0)], out=self._xh_PH[self._layout.rows(0)])
        return ops.attention(self._layout, t, self._qkv_PW, keys_J2KV, self._out_PA)

    def _step(self, k: int, attention: Attention) -> None:
        c, ops, w, eps, t = self.config, self._ops, self._w, self.config.rms_norm_eps, self._tables
        z, a = self._layout.rows(k), self._a
        columns = a if k == 0 else self.width
        torch.mm(self._xh_PH[z], w.hidden_WH[:columns].T, out=self._qkv_PW[z, :columns])
        ops.rotate(self._qkv_PW[z, :a], t["rotation_P"][z], c.num_heads, c.num_heads, self._rotation,
                   add=self._token_q_EA, rows=t["query_P"][z])  # fmt: skip
        if k:
            ops.rotate(self._qkv_PW[z, a:], t["rotation_P"][z], 2 * c.num_kv_heads, c.num_kv_heads, self._rotation,
                       add=self._token_kv_J2KV, rows=t["token_P"][z])  # fmt: skip
        attention.forward(k)
        before, rows = (self._hid_JH, t["start_P"][z]) if k == 0 else (self.fed_PH[self._previous(k)], None)
        ops.norm(before, w.mlp_norm_H, eps, self._xr_PH[z], self._rstd_r_P[z], add=self._out_PA[z] @ w.out_HA.T,
                 rows=rows, total=self._r_PH[z])  # fmt: skip
        torch.mm(self._xr_PH[z], w.gate_up_2IH.T, out=self._gu_P2I[z])
        ops.gate(self._gu_P2I[z], self._act_PI[z])
        self._hand_on(k, self._act_PI[z] @ w.down_HI.T)

    def _hand_on(self, k: int, mlp_nH: Tensor) -> None:
        """u, fed, and the next step's normed input."""
        ops, w, eps, layout = self._ops, self._w, self.config.rms_norm_eps, self._layout
        z = layout.rows(k)
        following = layout.rows(k + 1) if k + 1 < layout.steps else slice(0, 0)
        x_in, rstd_in = self._xh_PH[following], self._rstd_in_P[following]
        if self.config.norm_output:
            ops.norm(self._r_PH[z], w.norm_H, eps, self.fed_PH[z], self._rstd_u_P[z], add=mlp_nH, total=self._u_PH[z])
            ops.norm(self.fed_PH[layout.rows(k, len(x_in))], w.hidden_norm_H, eps, x_in, rstd_in)
        else:
            ops.norm(self._r_PH[z], w.hidden_norm_H, eps, x_in, rstd_in, add=mlp_nH, total=self._u_PH[z])

    def _previous(self, k: int) -> slice:
        """The rows that the chains alive in step k have in the step before."""
        return self._layout.rows(k - 1, self._layout.counts[k])

    def backward(self, d_fed_PH: Tensor, g: Matrices, d_norm: Tensor) -> None:
        """All weights' gradients but the head's, into `g`; `d_fed_PH` is used up.

        `d_norm`: sums of the last norm's gain, to which eagle3.1 adds what its fed-back states send.
        """
        ops, hidden = self._ops, self.config.hidden_size
        self._d_r_PH, self._d_out_PA = torch.empty_like(self._r_PH), torch.empty_like(self._out_PA)
        self._d_qkv_PW = torch.empty_like(self._qkv_PW)
        self._attention.begin_backward(self._d_out_PA, self._d_qkv_PW)
        self._d_mlp_norm, self._d_hidden_norm = ops.gain_sums(hidden), ops.gain_sums(hidden)
        for k in reversed(range(self._layout.steps)):
            if self._layout.counts[k]:
                self._step_backward(k, d_fed_PH, d_norm)
        torch.mm(self._d_r_PH.T, self._out_PA, out=g.out_HA)
        torch.mm(self._gu_P2I.T, self._xr_PH, out=g.gate_up_2IH)
        torch.mm(d_fed_PH.T, self._act_PI, out=g.down_HI)
        self._keys_backward(g)
        g.mlp_norm_H.copy_(self._d_mlp_norm.sum(0))
        g.hidden_norm_H.copy_(self._d_hidden_norm.sum(0))

    def _step_backward(self, k: int, d_fed_PH: Tensor, d_norm: Tensor) -> None:
        c, ops, w, t = self.config, self._ops, self._w, self._tables
        z, a = self._layout.rows(k), self._a
        if c.norm_output:  # d_fed becomes d_u in place
            ops.norm_backward(d_fed_PH[z], self._u_PH[z], self._rstd_u_P[z], w.norm_H, d_fed_PH[z], d_norm)
        d_u = d_fed_PH[z]
        ops.gate_backward(self._gu_P2I[z], d_u @ w.down_HI)
        ops.norm_backward(self._gu_P2I[z] @ w.gate_up_2IH, self._r_PH[z], self._rstd_r_P[z], w.mlp_norm_H,
                          self._d_r_PH[z], self._d_mlp_norm, residual=d_u)  # fmt: skip
        torch.mm(self._d_r_PH[z], w.out_HA, out=self._d_out_PA[z])
        self._attention.backward(k)
        d_qkv, positions = self._d_qkv_PW[z], t["rotation_P"][z]
        ops.rotate(d_qkv[:, :a], positions, c.num_heads, c.num_heads, self._rotation, inverse=True)
        if k == 0:
            return
        ops.rotate(d_qkv[:, a:], positions, 2 * c.num_kv_heads, c.num_kv_heads, self._rotation, inverse=True)
        before = self._previous(k)
        ops.norm_backward(d_qkv @ w.hidden_WH, self.fed_PH[before], self._rstd_in_P[z], w.hidden_norm_H,
                          d_fed_PH[before], self._d_hidden_norm, residual=self._d_r_PH[z], accumulate=True)  # fmt: skip

    def _keys_backward(self, g: Matrices) -> None:
        """Step-0 keys and values, `fc`, and the token's share of the projections."""
        c, ops, w, t, layout, a = self.config, self._ops, self._w, self._tables, self._layout, self._a
        d_kv = self._attention.key_gradient()
        ops.rotate(d_kv, t["rotation_J"], 2 * c.num_kv_heads, c.num_kv_heads, self._rotation, inverse=True)
        first, starts = layout.rows(0), t["start_P"][layout.rows(0)]
        d_q0 = self._d_qkv_PW[first, :a]
        d_xh_JH = d_kv @ w.hidden_WH[a:]
        d_xh_JH.index_add_(0, starts, d_q0 @ w.hidden_WH[:a])
        d_hid_JH = torch.zeros_like(self._hid_JH)
        d_hid_JH.index_copy_(0, starts.long(), self._d_r_PH[first])
        ops.norm_backward(d_xh_JH, self._hid_JH, self._rstd_key_J, w.hidden_norm_H, d_hid_JH, self._d_hidden_norm,
                          accumulate=True)  # fmt: skip
        self._fc_backward(d_hid_JH, g)
        later = slice(layout.offsets[1], layout.pairs)
        torch.mm(self._d_qkv_PW[later].T, self._xh_PH[later], out=g.hidden_WH)
        g.hidden_WH[:a].addmm_(d_q0.T, self._xh_PH[first])
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
