"""The loss of `drafter.step` by the drafter's own functions and autograd alone: slower, and what the fast one must equal.

In float64 it is the truth that both are measured against where shapes are too large for a chain-by-chain oracle.

It shares nothing with the fast step but the plan and the loss: keys of all positions a chain may look back to, then step
after step of the chains that are still alive, each through `Drafter.pair`, `queries`, `keys_values` and `finish`.

Attention goes document by document (no padding, no mask over other documents), head and loss in slices of rows; a
slice that is not the only one is recomputed in the backward pass, so memory does not grow with the draft vocabulary
or with the length of a document.

Shapes: P key positions (documents cut behind their last chain), M chains, N chains alive in a step, K steps,
H hidden, Q query heads, G = Q / KV heads, D head size, Vd draft vocabulary, U label positions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eagle3_core.drafter import losses
from eagle3_core.drafter.losses import LossName, Objective, distance
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.step import PackedBatch, StepCounts, count_hits
from eagle3_core.drafter.verifier_parts import Teacher

Measure = Callable[[Tensor, Tensor, LossName, bool], tuple[Tensor, Tensor | None]]
"""(logits, teacher's probabilities, loss, whether alpha is asked) -> (distance, alpha), as `losses.distance`."""

HEAD_ELEMENTS = 1 << 27
"""Logits (rows x Vd) computed at once: 512 MiB in float32."""
SCORE_ELEMENTS = 1 << 27
"""Attention scores (heads x rows x keys) computed at once."""


def reference_loss(
    drafter: Drafter,
    teacher: Teacher,
    batch: PackedBatch,
    objective: Objective,
    noise: Callable[[Tensor], Tensor] | None = None,
    measure: Measure = distance,
) -> tuple[Tensor, Tensor, StepCounts]:
    """(numerator, denominator, counts) of `batch`; the loss is their quotient (see `drafter.losses`).

    `drafter` and `teacher` on the batch's device and in the dtype of the products; `noise` maps aux states to noisy
    ones; `measure` stands for `losses.distance`, and is called with the learning rows of step after step. A batch
    without chains gives (0 with a gradient of zero, 0, zero counts).
    """
    device, plan, steps = batch.aux_T3H.device, batch.plan, objective.steps
    valid_MK = torch.from_numpy(plan.valid_MK).to(device)
    start_M = torch.from_numpy(plan.start_M).to(device)
    exact = torch.promote_types(teacher.head_VdH.dtype, torch.float32)
    distance_MK = torch.zeros(valid_MK.shape, device=device, dtype=exact)
    overlap_MK = torch.ones(valid_MK.shape, device=device, dtype=exact) if objective.needs_overlap else None
    hit_MK = torch.zeros(valid_MK.shape, dtype=torch.bool, device=device)
    if len(plan.start_M) == 0:
        zero = sum((w.sum() * 0.0 for w in drafter.weights.values()), torch.zeros((), device=device))
        return zero, torch.zeros((), device=device), StepCounts(hit_MK.sum(0), valid_MK.sum(0))
    unroll = _Unroll(drafter, batch, noise)
    labels = _Labels(teacher, batch, drafter.config.draft_vocab_size, steps, measure)
    for k in range(int(plan.depth_M.max())):
        out_NH, alive_N = unroll.step(k)
        learns = torch.from_numpy(np.flatnonzero(plan.valid_MK[plan.depth_M > k, k])).to(device)
        if len(learns) == 0:
            continue
        rows_R = alive_N[learns]
        out_RH = out_NH if len(learns) == len(out_NH) else out_NH.index_select(0, learns)
        d_R, a_R, best_R = labels.score(drafter, out_RH, start_M[rows_R] + 1 + k, objective)
        distance_MK = distance_MK.index_put((rows_R, torch.tensor(k, device=device)), d_R)
        if overlap_MK is not None and a_R is not None:
            overlap_MK = overlap_MK.index_put((rows_R, torch.tensor(k, device=device)), a_R)
        hit_MK[rows_R, k] = drafter.tokens(best_R) == labels.text(rows_R, k)
    numerator, denominator = losses.reduce_pairs(objective, distance_MK, overlap_MK, valid_MK)
    return numerator, denominator, count_hits(hit_MK, valid_MK)


class _Unroll:
    """The chains of one batch, step after step."""

    def __init__(self, drafter: Drafter, batch: PackedBatch, noise: Callable[[Tensor], Tensor] | None) -> None:
        self.drafter, self.batch, self.plan = drafter, batch, batch.plan
        device = batch.aux_T3H.device
        starts, stops = batch.offsets[:-1], batch.plan.key_stops
        lengths = stops - starts
        self.key_counts: list[int] = lengths.tolist()
        key_offsets = np.concatenate([[0], np.cumsum(lengths)])
        local_P = np.arange(key_offsets[-1]) - np.repeat(key_offsets[:-1], lengths)
        packed_P = torch.from_numpy(local_P + np.repeat(starts, lengths)).to(device)
        aux_P3H = batch.aux_T3H if len(packed_P) == len(batch.aux_T3H) else batch.aux_T3H[packed_P]
        hidden_PH = drafter.combine(noise(aux_P3H) if noise else aux_P3H)
        pair_P2H = drafter.pair(batch.input_ids_T[packed_P + 1], hidden_PH)
        position_P = torch.from_numpy(local_P + 1).to(device)
        self.keys_PKD, self.values_PKD = drafter.keys_values(pair_P2H, position_P)

        document_M = np.repeat(np.arange(len(starts)), np.diff(batch.plan.row_offsets))
        local_M = batch.plan.start_M - starts[document_M]
        row_M = torch.from_numpy(key_offsets[document_M] + local_M).to(device)
        self.document_N, self.look_back_N = document_M, local_M
        self.alive_N = torch.arange(len(document_M), device=device)
        self.depth_N = batch.plan.depth_M
        self.start_N = torch.from_numpy(batch.plan.start_M).to(device)
        self.position_N = torch.from_numpy(local_M + 1).to(device)
        self.hidden_NH, self.pair_N2H = hidden_PH.index_select(0, row_M), pair_P2H.index_select(0, row_M)
        self.own_keys: list[Tensor] = []
        self.own_values: list[Tensor] = []

    def step(self, k: int) -> tuple[Tensor, Tensor]:
        """What step k leaves: out [N, H] of the chains alive, and which of the M chains those are."""
        if k > 0:
            self._narrow(np.flatnonzero(self.depth_N > k))
            ids_N = self.batch.input_ids_T[self.start_N + 1 + k]
            self.pair_N2H = self.drafter.pair(ids_N, self.hidden_NH)
            key_NKD, value_NKD = self.drafter.keys_values(self.pair_N2H, self.position_N + k)
            self.own_keys.append(key_NKD)
            self.own_values.append(value_NKD)
        queries_NQD = self.drafter.queries(self.pair_N2H, self.position_N + k)
        self.hidden_NH = self.drafter.finish(self._attend(queries_NQD), self.hidden_NH)
        return self.hidden_NH, self.alive_N

    def _narrow(self, keep: np.ndarray) -> None:
        """Go on with the chains `keep` (indices into the alive ones)."""
        if len(keep) == len(self.depth_N):
            return
        index = torch.from_numpy(keep).to(self.alive_N.device)
        self.document_N, self.look_back_N, self.depth_N = (
            self.document_N[keep],
            self.look_back_N[keep],
            self.depth_N[keep],
        )
        self.alive_N, self.start_N, self.position_N = self.alive_N[index], self.start_N[index], self.position_N[index]
        self.hidden_NH = self.hidden_NH.index_select(0, index)
        self.own_keys = [t.index_select(0, index) for t in self.own_keys]
        self.own_values = [t.index_select(0, index) for t in self.own_values]

    def _attend(self, queries_NQD: Tensor) -> Tensor:
        """[N, Q, D] outputs of all heads, document by document.

        Documents are cut out by `split`, whose backward is one concatenation; slices would each fill a whole tensor.
        """
        c = self.drafter.config
        group = c.num_heads // c.num_kv_heads
        queries_NKGD = queries_NQD.unflatten(1, (c.num_kv_heads, group)) * c.head_dim**-0.5
        counts = np.bincount(self.document_N, minlength=len(self.key_counts)).tolist()
        nothing: list[Tensor | None] = [None] * len(counts)
        own, own_values = nothing, nothing
        if self.own_keys:
            scores = [(queries_NKGD * key[:, :, None]).sum(-1) for key in self.own_keys]
            own = list(torch.stack(scores, dim=-1).split(counts))
            own_values = list(torch.stack(self.own_values, dim=2).split(counts))
        look_back = torch.from_numpy(self.look_back_N).to(queries_NQD.device).split(counts)
        keys, values = self.keys_PKD.split(self.key_counts), self.values_PKD.split(self.key_counts)
        documents = zip(queries_NKGD.split(counts), keys, values, look_back, own, own_values, strict=True)
        return torch.cat([_attend_document(*parts) for parts in documents if len(parts[0])]).flatten(1, 2)


def _attend_document(
    queries_RKGD: Tensor,
    keys_PKD: Tensor,
    values_PKD: Tensor,
    look_back_R: Tensor,
    own_RKGk: Tensor | None,
    own_values_RKkD: Tensor | None,
) -> Tensor:
    """[R, K, G, D] for all R chains of one document, in slices where the scores of all are too many."""
    rows, kv_heads, group, _ = queries_RKGD.shape
    most = max(1, SCORE_ELEMENTS // (kv_heads * group * len(keys_PKD)))
    if rows <= most:
        return _attend_rows(queries_RKGD, keys_PKD, values_PKD, look_back_R, own_RKGk, own_values_RKkD)
    outputs: list[Tensor] = []
    for first in range(0, rows, most):
        piece = slice(first, first + most)
        arguments = (
            queries_RKGD[piece], keys_PKD, values_PKD, look_back_R[piece],
            None if own_RKGk is None else own_RKGk[piece],
            None if own_values_RKkD is None else own_values_RKkD[piece],
        )  # fmt: skip
        outputs.append(
            checkpoint(_attend_rows, *arguments, use_reentrant=False)
            if torch.is_grad_enabled()
            else _attend_rows(*arguments)
        )
    return torch.cat(outputs)


def _attend_rows(
    queries_RKGD: Tensor,
    keys_PKD: Tensor,
    values_PKD: Tensor,
    look_back_R: Tensor,
    own_RKGk: Tensor | None,
    own_values_RKkD: Tensor | None,
) -> Tensor:
    """[R, K, G, D]: attention of R chains of one document to its keys up to their start, and to their own keys."""
    rows, _, group, _ = queries_RKGD.shape
    queries_K = queries_RKGD.permute(1, 2, 0, 3).flatten(1, 2)  # [K, G*R, D]
    scores = (queries_K @ keys_PKD.permute(1, 2, 0)).unflatten(1, (group, rows))
    hidden_RP = torch.arange(len(keys_PKD), device=look_back_R.device) > look_back_R[:, None]
    scores = scores.masked_fill(hidden_RP, float("-inf"))
    if own_RKGk is not None:
        scores = torch.cat([scores, own_RKGk.permute(1, 2, 0, 3)], dim=-1)
    shares = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(queries_RKGD.dtype)
    common = shares[..., : len(keys_PKD)].flatten(1, 2) @ values_PKD.transpose(0, 1)
    out_RKGD = common.unflatten(1, (group, rows)).permute(2, 0, 1, 3)
    if own_values_RKkD is not None:
        own = shares[..., len(keys_PKD) :].permute(2, 0, 1, 3)
        out_RKGD = out_RKGD + own @ own_values_RKkD
    return out_RKGD


class _Labels:
    """The verifier's side of a batch: distributions at the label positions, and the text itself."""

    def __init__(self, teacher: Teacher, batch: PackedBatch, draft_vocab: int, steps: int, measure: Measure) -> None:
        self.teacher, self.batch, self.draft_vocab, self.measure = teacher, batch, draft_vocab, measure
        self.rows_at_once = max(1, HEAD_ELEMENTS // draft_vocab)
        plan, device = batch.plan, batch.aux_T3H.device
        stop_M = np.repeat(batch.offsets[1:], np.diff(plan.row_offsets))
        self.start_M, self.stop_M = torch.from_numpy(plan.start_M).to(device), torch.from_numpy(stop_M).to(device)
        label_MK = plan.start_M[:, None] + 1 + np.arange(steps)
        label_U = np.unique(label_MK[plan.valid_MK])
        self.table_UVd: Tensor | None = None
        if len(label_U) <= self.rows_at_once:
            at = torch.from_numpy(label_U).to(device)
            self.table_UVd = teacher.probabilities(batch.final_FH[batch.final_row_T[at]])
            self.entry_T = torch.zeros(len(batch.input_ids_T), dtype=torch.long, device=device)
            self.entry_T[at] = torch.arange(len(label_U), device=device)

    def text(self, chain_R: Tensor, k: int) -> Tensor:
        """The token that step k of each chain is to draft, as the text has it; -1 behind the document's end."""
        position_R, ids = self.start_M[chain_R] + 2 + k, self.batch.input_ids_T
        return torch.where(position_R < self.stop_M[chain_R], ids[position_R.clamp(max=len(ids) - 1)], -1)

    def probabilities(self, label_R: Tensor) -> Tensor:
        """[R, Vd] float32 at packed label positions."""
        if self.table_UVd is not None:
            return self.table_UVd[self.entry_T[label_R]]
        return self.teacher.probabilities(self.batch.final_FH[self.batch.final_row_T[label_R]])

    def score(
        self, drafter: Drafter, out_RH: Tensor, label_R: Tensor, objective: Objective
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Per row: distance, alpha (or None), and the drafter's best draft id."""

        def part(out: Tensor, label: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
            logits = drafter.logits(out)
            d, a = self.measure(logits, self.probabilities(label), objective.loss, objective.needs_overlap)
            return d, a, logits.detach().argmax(-1)

        if len(out_RH) <= self.rows_at_once:
            return part(out_RH, label_R)
        parts: list[tuple[Tensor, Tensor | None, Tensor]] = [
            checkpoint(part, out, label, use_reentrant=False) if torch.is_grad_enabled() else part(out, label)
            for out, label in zip(out_RH.split(self.rows_at_once), label_R.split(self.rows_at_once), strict=True)
        ]
        overlaps = [a for _, a, _ in parts if a is not None]
        best = torch.cat([b for *_, b in parts])
        return torch.cat([d for d, *_ in parts]), torch.cat(overlaps) if overlaps else None, best
