"""Compare gradients of alpha on the same side of its jumps.

alpha = sum_v min(p_v, q_v) has a gradient by q_v of 1 where q_v < p_v and of 0 elsewhere. Rounding moves q by a relative
e, so a token whose p and q lie closer together than that may fall on either side, whoever computes it: of V tokens some
rho e V do, each with an error as large as its share of the gradient. The gradient of `tv` (and that part of `lk`, and of
the expected length) is therefore only good to about sqrt(rho e) in norm, where every smooth loss is good to e. That is
no fault of an implementation and says nothing about one.

So the side on which an implementation computed is taken from it, token by token, and the reference in float64 computes
on that side too: then all losses agree to e. What remains to be seen is that sides differ at near ties only, and
`Truth.widest_gap` says how near.

Shapes: R learning rows, Vd draft vocabulary; the reference walks them step by step, chain by chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3_core.drafter import losses
from eagle3_core.drafter.losses import LossName
from eagle3_core.drafter.operations import Operations, Scores
from eagle3_core.drafter.rows import RowLayout


class WithSides:
    """Operations that note on which side of its jump each token of each learning row was."""

    def __init__(self, inner: Operations) -> None:
        self._inner = inner
        self._parts: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def score(
        self, logits_RVd: Tensor, teacher_UVd: Tensor, label_R: Tensor, first_label: int, loss: LossName, *, overlap: bool
    ) -> Scores:  # fmt: skip
        """See `Operations.score`."""
        scores = self._inner.score(logits_RVd, teacher_UVd, label_R, first_label, loss, overlap=overlap)
        q = (logits_RVd.float() - scores.student_log_sum[:, None]).exp_()
        teacher = teacher_UVd.float().index_select(0, label_R.long() - first_label)
        self._parts.append(q < (teacher - scores.teacher_log_sum[:, None]).exp_())
        return scores

    def below(self, layout: RowLayout) -> Tensor:
        """bool [R, Vd]: q < p, in the order in which the reference walks the rows."""
        pair_R = layout.host["pair_R"]
        step_R = np.searchsorted(layout.offsets, pair_R, side="right") - 1
        start_R = layout.host["position_J"][layout.host["start_P"][pair_R]]
        below = torch.cat(self._parts)
        return below[torch.from_numpy(np.lexsort((start_R, step_R))).to(below.device)]


@dataclass
class ReferenceSides:
    """A `reference.Measure` that notes the sides of the reference itself."""

    parts: list[Tensor] = field(default_factory=list[Tensor])

    def __call__(
        self, logits_NVd: Tensor, teacher_NVd: Tensor, loss: LossName, with_overlap: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `losses.distance`."""
        self.parts.append(logits_NVd.detach().float().softmax(-1) < teacher_NVd)
        return losses.distance(logits_NVd, teacher_NVd, loss, with_overlap)

    def below(self) -> Tensor:
        """bool [R, Vd]."""
        return torch.cat(self.parts)


@dataclass
class Truth:
    """A `reference.Measure` on the sides `below_RVd`; it notes where those are not its own."""

    below_RVd: Tensor
    flips: int = 0
    """Tokens that are on the other side."""
    widest_gap: float = 0.0
    """The largest |log q - log p| among them."""
    _at: int = 0

    def __call__(
        self, logits_NVd: Tensor, teacher_NVd: Tensor, loss: LossName, with_overlap: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `losses.distance`."""
        below_NVd = self.below_RVd[self._at : self._at + len(logits_NVd)]
        self._at += len(logits_NVd)
        log_q = logits_NVd.detach().log_softmax(-1)
        gap_NVd = (log_q - teacher_NVd.log()).abs()[(log_q.exp() < teacher_NVd) != below_NVd]
        self.flips += len(gap_NVd)
        self.widest_gap = max(self.widest_gap, float(gap_NVd.max()) if len(gap_NVd) else 0.0)
        return losses.distance(logits_NVd, teacher_NVd, loss, with_overlap, below_NVd)
