"""The step's operations in torch alone: what a CPU runs, and any GPU that the kernels do not fit.

Statistics are float32 whatever the buffers hold. Attention is in `drafter.plain_attention`.

Shapes as in `drafter.operations`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.losses import LK_ETA, LossName
from eagle3_core.drafter.model import ACTIVATIONS
from eagle3_core.drafter.operations import Attention, Scores
from eagle3_core.drafter.plain_attention import PlainAttention
from eagle3_core.drafter.rows import RowLayout, Tables


class PlainOperations:
    """`operations.Operations` in torch."""

    def __init__(self, config: DrafterConfig) -> None:
        self._config = config
        self._activation = ACTIVATIONS[config.hidden_act]

    def norm(
        self, x: Tensor, gain_H: Tensor | None, eps: float, out: Tensor, rstd: Tensor, *, add: Tensor | None = None,
        rows: Tensor | None = None, total: Tensor | None = None,
    ) -> None:  # fmt: skip
        """See `Operations.norm`."""
        if rows is not None:
            x = x.index_select(0, rows)
        if add is not None:
            x = (x.float() + add.float()).to(out.dtype)
        if total is not None:
            total.copy_(x)
        if not len(out):
            return
        x = x[: len(out)].float()
        torch.rsqrt(x.square().mean(-1) + eps, out=rstd)
        normed = x * rstd[:, None]
        out.copy_(normed if gain_H is None else normed.mul_(gain_H.float()))

    def norm_backward(
        self, d: Tensor, x: Tensor, rstd: Tensor, gain_H: Tensor, out: Tensor, d_gain: Tensor, *,
        rows: Tensor | None = None, residual: Tensor | None = None, accumulate: bool = False,
    ) -> None:  # fmt: skip
        """See `Operations.norm_backward`: dx = rstd (d g - x^ mean(d g x^)), x^ = x rstd."""
        if rows is not None:
            x = x.index_select(0, rows)
        normed, d = x.float() * rstd[:, None], d.float()
        d_gain[0] += (d * normed).sum(0)
        d = d * gain_H.float()
        dx = (d - normed * (d * normed).mean(-1, keepdim=True)).mul_(rstd[:, None])
        if residual is not None:
            dx += residual
        if rows is not None:
            dx = dx.to(out.dtype)
            if accumulate:
                out.index_add_(0, rows, dx)
            else:
                out.index_copy_(0, rows.long(), dx)
        elif accumulate:
            out += dx
        else:
            out.copy_(dx)

    def gain_sums(self, hidden: int) -> Tensor:
        """See `Operations.gain_sums`."""
        return torch.zeros(1, hidden)

    def rotate(
        self, x: Tensor, positions: Tensor, heads: int, rotated: int, tables: tuple[Tensor, Tensor], *,
        add: Tensor | None = None, rows: Tensor | None = None, inverse: bool = False,
    ) -> None:  # fmt: skip
        """See `Operations.rotate`."""
        if add is not None:
            x += add if rows is None else add.index_select(0, rows)
        cos, sin = (table.index_select(0, positions)[:, None] for table in tables)
        part = x.unflatten(-1, (heads, -1))[:, :rotated]
        a, b = part.float().chunk(2, -1)
        if inverse:
            sin = -sin
        part.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))

    def gate(self, gate_up_n2I: Tensor, out_nI: Tensor) -> None:
        """See `Operations.gate`."""
        gate, up = gate_up_n2I.chunk(2, -1)
        torch.mul(self._activation(gate), up, out=out_nI)

    def gate_backward(self, gate_up_n2I: Tensor, d_out_nI: Tensor) -> None:
        """See `Operations.gate_backward`."""
        gate, up = gate_up_n2I.chunk(2, -1)
        if self._config.hidden_act == "silu":
            share = torch.sigmoid(gate)
            value = gate * share
            slope = share.addcmul_(value, 1 - share)
        else:
            with torch.enable_grad():
                leaf = gate.detach().requires_grad_()
                value = self._activation(leaf)
                (slope,) = torch.autograd.grad(value.sum(), leaf)
            value = value.detach()
        torch.mul(d_out_nI * up, slope, out=gate)
        torch.mul(d_out_nI, value, out=up)

    def fold(self, matrix: Tensor, gain: Tensor) -> Tensor:
        """See `Operations.fold`."""
        return matrix * gain

    def fold_backward(self, d_folded: Tensor, matrix: Tensor, gain: Tensor, d_matrix: Tensor) -> Tensor:
        """See `Operations.fold_backward`."""
        torch.mul(d_folded, gain, out=d_matrix)
        return (d_folded.float() * matrix.float()).sum(0)

    def gather_sum(self, x: Tensor, pair_Kn: Tensor, steps: int, first: Tensor | None) -> Tensor:
        """See `Operations.gather_sum`."""
        found = pair_Kn.view(steps, -1)
        total = x.new_zeros(found.shape[1], x.shape[1]) if first is None else first.clone()
        for pair_n in found:
            (there,) = (pair_n >= 0).nonzero(as_tuple=True)
            total.index_add_(0, there, x.index_select(0, pair_n[there]))
        return total

    def scale(self, x: Tensor, factor: Tensor, out: Tensor) -> None:
        """See `Operations.scale`."""
        torch.mul(x, factor, out=out)

    def score(
        self, logits_RVd: Tensor, teacher_UVd: Tensor, label_R: Tensor, first_label: int, loss: LossName, *, overlap: bool
    ) -> Scores:  # fmt: skip
        """See `Operations.score`."""
        s, t = logits_RVd.float(), teacher_UVd.float()
        label_R = label_R.long() - first_label
        student, teacher_U = s.logsumexp(-1), t.logsumexp(-1)
        p_U = (t - teacher_U[:, None]).exp_()
        p_R = p_U.index_select(0, label_R)
        cross = student - torch.linalg.vecdot(p_R, s)
        entropy_U = teacher_U - torch.linalg.vecdot(p_U, t)
        alpha, below = torch.ones_like(cross), torch.zeros_like(cross)
        if overlap or loss in ("tv", "lk"):
            q = (s - student[:, None]).exp_()
            alpha = torch.minimum(p_R, q).sum(-1)
            below = (q * (q < p_R)).sum(-1)
        kl = cross - entropy_U.index_select(0, label_R)
        share = torch.exp(-LK_ETA * alpha)
        distance = {"soft_ce": cross, "kl": kl, "tv": 1.0 - alpha, "lk": share * kl + (1.0 - share) * (1.0 - alpha)}[
            loss
        ]
        return Scores(distance, alpha, below, s.argmax(-1), student, teacher_U.index_select(0, label_R))

    def score_backward(
        self, logits_RVd: Tensor, teacher_UVd: Tensor, label_R: Tensor, first_label: int, loss: LossName, scores: Scores,
        d_distance_R: Tensor, d_overlap_R: Tensor | None,
    ) -> None:  # fmt: skip
        """See `Operations.score_backward`: d = c1 (q - p) + c2 q ([q < p] - below)."""
        by_entropy, by_overlap = row_coefficients(loss, scores.overlap, d_distance_R, d_overlap_R)
        q = (logits_RVd.float() - scores.student_log_sum[:, None]).exp_()
        p = (teacher_UVd.float().index_select(0, label_R.long() - first_label) - scores.teacher_log_sum[:, None]).exp_()
        if by_overlap is None:
            torch.mul(q.sub_(p), by_entropy[:, None], out=logits_RVd)
            return
        through = q * ((q < p).float() - scores.below[:, None])
        logits_RVd.copy_(by_entropy[:, None] * (q - p) + by_overlap[:, None] * through)

    def attention(
        self, layout: RowLayout, tables: Tables, queries_PW: Tensor, keys_J2KV: Tensor, out_PA: Tensor
    ) -> Attention:
        """See `Operations.attention`."""
        return PlainAttention(self._config, layout, queries_PW, keys_J2KV, out_PA)


def row_coefficients(
    loss: LossName, overlap_R: Tensor, d_distance_R: Tensor, d_overlap_R: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(c1, c2) of a row's gradient c1 (q - p) + c2 d alpha, from the loss's derivatives by its distance and alpha."""
    if loss in ("soft_ce", "kl"):
        return d_distance_R, d_overlap_R
    share = torch.exp(-LK_ETA * overlap_R) if loss == "lk" else torch.zeros_like(overlap_R)
    by_overlap = -(1.0 - share) * d_distance_R
    return share * d_distance_R, by_overlap if d_overlap_R is None else by_overlap + d_overlap_R
