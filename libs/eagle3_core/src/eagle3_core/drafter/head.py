"""Head and loss of the learning rows, piece by piece: logits exist for one piece at a time and turn into their gradient.

The learning rows of one label lie side by side, so a piece multiplies each label's final state once with the verifier's
head and up to K chains' states with the drafter's. What the gradient of a row's logits is depends on the row's two
coefficients: the loss's derivatives by its distance and by its alpha. Both come from `losses.reduce_pairs` itself, so
there is one place that says how pairs are weighed:

- if no alpha weighs anything (`Objective.needs_overlap` is false), the loss is linear in the distances, its coefficients
  are known before any logit is, and one pass over the pieces does everything;
- else alphas of all steps of a chain are needed first: a first pass scores, a second makes the logits again and turns
  them into gradients. Where all logits fit into one piece they are kept, and nothing is made twice.

Shapes: R learning rows, U labels, P pair rows, M chains, K steps, H hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from eagle3_core.drafter import losses
from eagle3_core.drafter.flat import Matrices
from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.operations import Operations, Scores
from eagle3_core.drafter.rows import RowLayout, Tables
from eagle3_core.drafter.verifier_parts import Teacher

HEAD_BYTES = 1 << 29
"""Logits of the drafter made at once."""


@dataclass
class HeadGradient:
    """What the head sends back."""

    d_fed_PH: Tensor
    """Gradient of the states that the head read; zero at pair rows that no loss reads."""
    d_norm: Tensor
    """Sums of the last norm's gain (`Operations.gain_sums`)."""
    d_head_VdH: Tensor | None
    """None where the head is frozen."""


@dataclass
class _Piece:
    """One piece while its logits exist."""

    labels: slice
    rows: slice
    x_RH: Tensor
    rstd_R: Tensor
    logits_RVd: Tensor
    teacher_UVd: Tensor


class Head:
    """Head and loss of one batch."""

    def __init__(
        self, ops: Operations, weights: Matrices, teacher: Teacher, layout: RowLayout, tables: Tables,
        objective: Objective, *, eps: float, norm_output: bool,
    ) -> None:  # fmt: skip
        self._ops, self._w, self._teacher, self._eps, self._norm_output = ops, weights, teacher, eps, norm_output
        self._layout, self._t, self._objective = layout, tables, objective
        head = weights.head_VdH
        assert head is not None
        self._head_VdH = head
        most = max(1, HEAD_BYTES // (len(head) * head.element_size()))
        self._chunks = layout.label_chunks(most)
        self.valid_MK = tables["valid_MK"].view(-1, layout.steps) > 0

    def run(
        self, fed_PH: Tensor, final_FH: Tensor, final_row_U: Tensor, *, learn: bool, train_head: bool
    ) -> tuple[Tensor, Tensor, Tensor, HeadGradient | None]:
        """(numerator, denominator, best draft id of each learning row [R], gradient of the numerator if `learn`)."""
        self._fed_PH, self._final_FH, self._final_row_U = fed_PH, final_FH, final_row_U
        gradient = self._start_gradient(train_head) if learn else None
        one_pass = not self._objective.needs_overlap
        ahead = self._coefficients(None, None) if learn and one_pass else None
        all_scores: list[Scores] = []
        kept: _Piece | None = None
        for chunk in self._chunks:
            piece = self._make(*chunk)
            all_scores.append(self._score(piece))
            if gradient is not None and ahead is not None:
                self._send_back(piece, all_scores[-1], ahead, gradient)
            elif len(self._chunks) == 1:
                kept = piece
        scores = _joined(all_scores)
        distance_MK, overlap_MK = self._by_pair(scores)
        numerator, denominator = losses.reduce_pairs(self._objective, distance_MK, overlap_MK, self.valid_MK)
        if gradient is not None and ahead is None:
            coefficients = self._coefficients(distance_MK, overlap_MK)
            for i, chunk in enumerate(self._chunks):
                piece = kept if kept is not None else self._make(*chunk)
                self._send_back(piece, all_scores[i], coefficients, gradient)
        return numerator, denominator, scores.best, gradient

    def _start_gradient(self, train_head: bool) -> HeadGradient:
        fed, head = self._fed_PH, self._head_VdH
        return HeadGradient(
            torch.zeros_like(fed), self._ops.gain_sums(fed.shape[1]), torch.empty_like(head) if train_head else None
        )

    def _make(self, labels: slice, rows: slice) -> _Piece:
        """Both sides' logits of a piece."""
        ops, pair_R, row_U = self._ops, self._t["pair_R"][rows], self._final_row_U[labels]
        like, hidden = self._fed_PH, self._fed_PH.shape[1]
        count, rstd_R = rows.stop - rows.start, torch.empty(0, device=like.device)
        if self._norm_output:
            x_RH = self._fed_PH.index_select(0, pair_R)
        else:
            x_RH, rstd_R = like.new_empty(count, hidden), like.new_empty(count, dtype=torch.float32)
            ops.norm(self._fed_PH, self._w.norm_H, self._eps, x_RH, rstd_R, rows=pair_R)
        teacher_UVd = self._teacher_states(row_U) @ self._teacher.head_VdH.T
        return _Piece(labels, rows, x_RH, rstd_R, x_RH @ self._head_VdH.T, teacher_UVd)

    def _teacher_states(self, row_U: Tensor) -> Tensor:
        """[U, H]: final states as the verifier's head reads them."""
        teacher = self._teacher
        if teacher.final == "post":
            return self._final_FH.index_select(0, row_U).to(teacher.head_VdH.dtype)
        y_UH = teacher.head_VdH.new_empty(len(row_U), self._final_FH.shape[1])
        rstd_U = y_UH.new_empty(len(row_U), dtype=torch.float32)
        self._ops.norm(self._final_FH, teacher.norm_H, teacher.eps, y_UH, rstd_U, rows=row_U)
        return y_UH

    def _score(self, piece: _Piece) -> Scores:
        return self._ops.score(
            piece.logits_RVd, piece.teacher_UVd, self._t["label_R"][piece.rows], piece.labels.start,
            self._objective.loss, overlap=self._objective.needs_overlap,
        )  # fmt: skip

    def _by_pair(self, scores: Scores) -> tuple[Tensor, Tensor | None]:
        """[M, K] distances and alphas of learning rows, 0 and 1 elsewhere."""
        entry_R, shape = self._t["entry_R"].long(), self.valid_MK.shape
        distance_MK = torch.zeros(shape, device=entry_R.device)
        distance_MK.view(-1).index_copy_(0, entry_R, scores.distance)
        if not self._objective.needs_overlap:
            return distance_MK, None
        overlap_MK = torch.ones(shape, device=entry_R.device)
        overlap_MK.view(-1).index_copy_(0, entry_R, scores.overlap)
        return distance_MK, overlap_MK

    def _coefficients(self, distance_MK: Tensor | None, overlap_MK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The loss's derivatives by each learning row's distance and alpha, [R] each; any point will do if it is linear."""
        if distance_MK is None:
            distance_MK = torch.zeros(self.valid_MK.shape, device=self.valid_MK.device)
        with torch.enable_grad():
            distance_MK = distance_MK.detach().requires_grad_()
            overlap_MK = overlap_MK.detach().requires_grad_() if overlap_MK is not None else None
            numerator, _ = losses.reduce_pairs(self._objective, distance_MK, overlap_MK, self.valid_MK)
        asked = [distance_MK] if overlap_MK is None else [distance_MK, overlap_MK]
        found = cast("tuple[Tensor | None, ...]", torch.autograd.grad(numerator, asked, allow_unused=True))
        entry_R = self._t["entry_R"]
        by_row = [g.view(-1).index_select(0, entry_R) if g is not None else None for g in found]
        assert by_row[0] is not None
        return by_row[0], by_row[1] if len(by_row) > 1 else None

    def _send_back(
        self, piece: _Piece, scores: Scores, coefficients: tuple[Tensor, Tensor | None], out: HeadGradient
    ) -> None:
        """The piece's part of the gradient; its logits are used up."""
        ops, rows, pair_R = self._ops, piece.rows, self._t["pair_R"][piece.rows]
        d_distance, d_overlap = coefficients
        ops.score_backward(
            piece.logits_RVd, piece.teacher_UVd, self._t["label_R"][rows], piece.labels.start, self._objective.loss,
            scores, d_distance[rows], None if d_overlap is None else d_overlap[rows],
        )  # fmt: skip
        d_x_RH = piece.logits_RVd @ self._head_VdH
        if out.d_head_VdH is not None:
            if piece.rows.start == 0:
                torch.mm(piece.logits_RVd.T, piece.x_RH, out=out.d_head_VdH)
            else:
                out.d_head_VdH.addmm_(piece.logits_RVd.T, piece.x_RH)
        if self._norm_output:  # every pair row has at most one label, so nothing is written twice
            out.d_fed_PH.index_copy_(0, pair_R.long(), d_x_RH)
        else:
            ops.norm_backward(d_x_RH, self._fed_PH, piece.rstd_R, self._w.norm_H, out.d_fed_PH, out.d_norm, rows=pair_R)


def _joined(parts: list[Scores]) -> Scores:
    if len(parts) == 1:
        return parts[0]
    return Scores(**{name: torch.cat([getattr(p, name) for p in parts]) for name in Scores.__dataclass_fields__})
