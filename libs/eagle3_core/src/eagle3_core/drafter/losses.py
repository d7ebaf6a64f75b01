"""Distances between the verifier's and the drafter's distribution, and how the steps of a chain are weighed.

All distances are over the draft vocabulary: p is the verifier's softmax over the draft tokens' logits (renormalised
over them), q the drafter's softmax. With alpha = sum_v min(p_v, q_v), the chance that sampling would accept:

    soft_ce  - sum_v p_v log q_v            EAGLE-3 (SafeAILab/EAGLE, SpecForge); same gradient as kl
    kl       sum_v p_v log(p_v / q_v)       speculators' default `kl_div`
    tv       1 - alpha                      total variation
    lk       w kl + (1 - w) tv, w = exp(-3 alpha), alpha detached      hybrid ("lambda") form of LK losses,
                                            arXiv 2602.23881, eta = 3 as in the paper and in speculators' `lk_hybrid`

The loss of a batch is one fraction, so that no step, document or forward pass weighs more than its pairs:

    loss = sum_{(p,k) valid} [ w_pk d_pk + (lambda / K) (1 - prod_{i<=k} alpha_pi) ] / sum_{(p,k) valid} w_pk

with w_pk from `step_weights`, lambda = `expected_length_weight`, and the products over the chain's valid steps: summed
over a chain, the second term is its number of steps minus its expected accepted tokens.

Shapes: N rows, Vd draft vocabulary, M chains, K steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LK_ETA = 3.0

LossName = Literal["soft_ce", "kl", "tv", "lk"]


@dataclass(frozen=True)
class Objective:
    """What training minimises; the fields of the same names in a job's `training`."""

    steps: int
    loss: LossName = "soft_ce"
    step_weights: Literal["equal", "decay", "survival"] = "equal"
    decay: float = 0.8
    expected_length_weight: float = 0.0

    @property
    def needs_overlap(self) -> bool:
        """Whether alpha is read at all."""
        return self.step_weights == "survival" or self.expected_length_weight > 0


def distance(
    logits_NVd: Tensor, teacher_NVd: Tensor, loss: LossName, with_overlap: bool, below_NVd: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Two [N] float32: the distance of each row, and alpha where asked (or part of the distance anyway).

    `logits_NVd` any float dtype, `teacher_NVd` float32 probabilities; of float64, float64. alpha's slope jumps where q
    meets p; `below_NVd` says for every token whether it is to count as q < p, where that is not to be found out here.
    """
    log_q = logits_NVd.log_softmax(-1, dtype=torch.promote_types(logits_NVd.dtype, torch.float32))
    overlap = None
    if with_overlap or loss in ("tv", "lk"):
        q = log_q.exp()
        least = torch.minimum(q, teacher_NVd) if below_NVd is None else torch.where(below_NVd, q, teacher_NVd)
        overlap = least.sum(-1)
    if loss == "tv":
        assert overlap is not None
        return 1.0 - overlap, overlap
    cross_entropy = -(teacher_NVd * log_q).sum(-1)
    if loss == "soft_ce":
        return cross_entropy, overlap
    kl = cross_entropy + torch.special.xlogy(teacher_NVd, teacher_NVd).sum(-1)
    if loss == "kl":
        return kl, overlap
    assert overlap is not None
    share = torch.exp(-LK_ETA * overlap.detach())
    return share * kl + (1.0 - share) * (1.0 - overlap), overlap


def reduce_pairs(
    objective: Objective, distance_MK: Tensor, overlap_MK: Tensor | None, valid_MK: Tensor
) -> tuple[Tensor, Tensor]:
    """Numerator and denominator (scalars) of the loss from per-pair values; entries that are not valid are ignored.

    `equal`: w = 1/K; `decay`: w_k ~ decay^k with sum 1 over k; `survival`: w_pk = prod_{i<k} alpha_pi / K, detached: the
    chance that sampling still has the chain alive when step k is tried.
    """
    steps = objective.steps
    valid = valid_MK.to(distance_MK.dtype)
    # A step that is not valid neither ends a chain nor counts: alpha 1 there.
    alive_MK = torch.where(valid_MK, overlap_MK, 1.0).cumprod(1) if overlap_MK is not None else None
    if objective.step_weights == "survival":
        assert alive_MK is not None
        before = torch.cat([torch.ones_like(alive_MK[:, :1]), alive_MK[:, :-1]], dim=1)
        weight_MK = before.detach() / steps * valid
    else:
        decay = objective.decay if objective.step_weights == "decay" else 1.0
        weight_K = decay ** torch.arange(steps, dtype=distance_MK.dtype, device=distance_MK.device)
        weight_MK = weight_K / weight_K.sum() * valid
    numerator = (weight_MK * torch.where(valid_MK, distance_MK, 0.0)).sum()
    if objective.expected_length_weight > 0:
        assert alive_MK is not None
        numerator = numerator + objective.expected_length_weight / steps * ((1.0 - alive_MK) * valid).sum()
    return numerator, weight_MK.sum()
