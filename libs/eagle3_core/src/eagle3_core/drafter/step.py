"""The loss of one packed batch: EAGLE-3's training-time test, exactly, on the rows that a loss reads and no others.

Step 0 gives keys and values to every position a chain may look back to; queries, MLP and head run only at chain
starts. Step k >= 1 of the chain at p attends to the step-0 keys j <= p of its document and to its own keys of steps
1..k ("the diagonal"): what decoding would have in its cache. Chains therefore never mix, and step k needs only the
chains that still have a valid step >= k.

The work in order: `drafter.rows` says which rows exist, `drafter.unroll` runs the chains, `drafter.head` scores them and,
while logits are there, sends their gradient back; the chains' backward waits for autograd to ask. `drafter.reference` is
the same loss by plain autograd, which tests compare with.

Shapes: T tokens of the batch, J key rows, P pair rows, R learning rows, M chains, K steps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from eagle3_core.drafter.chains import ChainPlan
from eagle3_core.drafter.flat import HEAD, Gradients, Matrices
from eagle3_core.drafter.head import Head, HeadGradient
from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.operations import Operations, operations_for
from eagle3_core.drafter.rows import RowLayout, Tables, lay_out
from eagle3_core.drafter.unroll import Unroll
from eagle3_core.drafter.verifier_parts import Teacher


@dataclass(frozen=True)
class PackedBatch:
    """Samples end to end. Documents may be cut behind the last position their plan reads."""

    input_ids_T: Tensor
    """i64 [T]."""
    offsets: np.ndarray
    """i64 [S+1] document bounds."""
    aux_T3H: Tensor
    final_FH: Tensor
    """The verifier's stored final states."""
    final_row_T: Tensor
    """i64 [T]: row of `final_FH` that holds the state of a position, -1 where none was kept."""
    plan: ChainPlan
    samples: tuple[int, ...] = ()
    """Numbers of the samples, for error messages."""
    layout: RowLayout | None = None
    """`rows.lay_out(plan, offsets)` if a loader has made it already, beside the compute."""


@dataclass(frozen=True)
class StepCounts:
    """Sums over a batch, to be added up over batches."""

    hits_K: Tensor
    """Pairs whose proposal is the text's next token, among `tried_K`."""
    tried_K: Tensor
    """Valid pairs all of whose earlier steps hit."""


def batch_loss(
    drafter: Drafter,
    teacher: Teacher,
    batch: PackedBatch,
    objective: Objective,
    noise: Callable[[Tensor], Tensor] | None = None,
    *,
    operations: Operations | None = None,
    tell: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, Tensor, StepCounts]:
    """(numerator, denominator, counts) of `batch`; the loss is their quotient (see `drafter.losses`).

    `drafter` and `teacher` on the batch's device and in the dtype of the products; `noise` maps aux states to noisy
    ones. Gradients of all of a drafter's trained weights come in one piece, as `flat.Gradients` lays them out. The
    denominator carries none. A batch without chains gives (0 with a gradient of zero, 0, zero counts).
    `operations` are those that fit the device unless given. `tell` gets the ranges of the flat gradient during the backward
    pass, each when it is final (`flat.Gradients`); from then on it may be changed in place.
    """
    layout = batch.layout or lay_out(batch.plan, batch.offsets)
    device = batch.aux_T3H.device
    if layout.pairs == 0:
        zero = sum((w.sum() * 0.0 for w in drafter.weights.values()), torch.zeros((), device=device))
        none_K = torch.zeros(layout.steps, dtype=torch.long, device=device)
        return zero, torch.zeros((), device=device), StepCounts(none_K, none_K)
    names = [name for name, weight in drafter.weights.items() if weight.requires_grad]
    learn = torch.is_grad_enabled() and bool(names)
    work = _Pass(drafter, teacher, batch, layout, objective, operations or operations_for(drafter.config, device), tell)
    if learn:
        weights = [drafter.weights[name] for name in names]
        numerator = cast("Tensor", _Differentiable.apply(work, noise, names, *weights))
    else:
        numerator = work.forward(noise, learn=False)
    return numerator, work.denominator, work.counts()


class _Pass:
    """One forward pass, and what its backward needs."""

    def __init__(
        self, drafter: Drafter, teacher: Teacher, batch: PackedBatch, layout: RowLayout, objective: Objective,
        ops: Operations, tell: Callable[[Tensor], None] | None,
    ) -> None:  # fmt: skip
        self._tell = tell
        self.drafter, self._batch, self._layout, self._ops, self._objective = drafter, batch, layout, ops, objective
        config, device = drafter.config, batch.aux_T3H.device
        self._trains_head = drafter.weights[HEAD].requires_grad
        weights = Matrices(config, {name: weight.detach() for name, weight in drafter.weights.items()})
        self._tables = Tables(layout, device)
        rotation = drafter.rope.half_tables(device, layout.reach)
        self._unroll = Unroll(config, ops, weights, layout, self._tables, rotation)
        self._head = Head(ops, weights, teacher, layout, self._tables, objective, eps=config.rms_norm_eps,
                          norm_output=config.norm_output)  # fmt: skip
        self.denominator = torch.zeros((), device=device)
        self._sent: HeadGradient | None = None

    @torch.no_grad()
    def forward(self, noise: Callable[[Tensor], Tensor] | None, *, learn: bool) -> Tensor:
        """The numerator; with `learn` also what the head sends back."""
        batch, layout, position_J = self._batch, self._layout, self._tables["position_J"]
        aux_J3H = batch.aux_T3H[: layout.keys] if layout.is_prefix else batch.aux_T3H.index_select(0, position_J)
        if noise is not None:
            aux_J3H = noise(aux_J3H)
        token_J = batch.input_ids_T.index_select(0, position_J + 1)
        self._unroll.forward(aux_J3H, self.drafter.embedding_VH, token_J)
        final_row_U = batch.final_row_T.index_select(0, self._tables["position_U"])
        numerator, self.denominator, self._best_R, self._sent = self._head.run(
            self._unroll.fed_PH, batch.final_FH, final_row_U, learn=learn, train_head=self._trains_head
        )
        return numerator

    @torch.no_grad()
    def backward(self, d_numerator: Tensor, names: list[str]) -> dict[str, Tensor]:
        """Gradients by name, views of one tensor."""
        sent = self._sent
        assert sent is not None
        self._sent = None
        gradients = Gradients(self.drafter.config, names, sent.d_fed_PH, self._tell)
        if sent.d_head_VdH is not None:
            self._ops.scale(sent.d_head_VdH, d_numerator, gradients.named[HEAD])
            sent.d_head_VdH = None
            gradients.portion_done()
        self._ops.scale(sent.d_fed_PH, d_numerator, sent.d_fed_PH)
        self._unroll.backward(
            sent.d_fed_PH, gradients.matrices, sent.d_norm.mul_(d_numerator), layer_done=gradients.portion_done
        )
        gradients.matrices.norm_H.copy_(sent.d_norm.sum(0))
        gradients.portion_done()
        return gradients.named

    def counts(self) -> StepCounts:
        """How often the drafter's best token was the text's, while its chain was still right."""
        text_R = self._tables["text_R"]
        token_R = self._batch.input_ids_T.index_select(0, text_R.clamp(min=0))
        hit_R = (self.drafter.tokens(self._best_R) == token_R) & (text_R >= 0)
        valid_MK = self._head.valid_MK
        hit_MK = torch.zeros(valid_MK.shape, dtype=torch.bool, device=text_R.device)
        hit_MK.view(-1).index_copy_(0, self._tables["entry_R"].long(), hit_R)
        return count_hits(hit_MK, valid_MK)


def count_hits(hit_MK: Tensor, valid_MK: Tensor) -> StepCounts:
    """Hits among the pairs whose chain was still right. A step that is not valid ends no chain and counts nowhere."""
    right_MK = (hit_MK | ~valid_MK).cumprod(1).bool()
    before_MK = torch.cat([torch.ones_like(right_MK[:, :1]), right_MK[:, :-1]], dim=1)
    tried_MK = valid_MK & before_MK
    return StepCounts((hit_MK & tried_MK).sum(0), tried_MK.sum(0))


class _Differentiable(torch.autograd.Function):
    """Lets autograd ask for what `_Pass.backward` computes."""

    @staticmethod
    def forward(
        ctx: Any, work: _Pass, noise: Callable[[Tensor], Tensor] | None, names: list[str], *weights: Tensor
    ) -> Tensor:
        ctx.work, ctx.names = work, names
        return work.forward(noise, learn=True)

    @staticmethod
    def backward(ctx: Any, *d: Tensor) -> tuple[Tensor | None, ...]:
        work = cast("_Pass", ctx.work)
        named = work.backward(d[0], ctx.names)
        ctx.work = None
        return (None, None, None, *[named.pop(name) for name in cast("list[str]", ctx.names)])
