"""The oracle of training: the drafter one pair at a time in float64, nothing shared, nothing fast. It stays plain.

It is also the autoregressive unroll that decoding does: a list of keys that grows by one a step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eagle3_core.drafter.chains import LabelRule
from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.testing import MemorySamples
from eagle3_core.drafter.verifier_parts import Teacher


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return gain * x / (x.square().mean() + 1e-5).sqrt()


def rotated(heads_hD: Tensor, position: int) -> Tensor:
    """The textbook rotation: pairs (i, i + D/2) turn by position x 100^(-2i/D)."""
    half = heads_hD.shape[-1] // 2
    angle = torch.tensor([position * 100.0 ** (-2 * i / (2 * half)) for i in range(half)], dtype=torch.float64)
    a, b = heads_hD[:, :half], heads_hD[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


class Plain:
    """One pair at a time through the drafter's layer."""

    def __init__(self, drafter: Drafter) -> None:
        self.c, self.w = drafter.config, {n: w.detach().double().requires_grad_() for n, w in drafter.weights.items()}
        self.embedding = drafter.embedding_VH.double()

    def combined(self, aux_3H: Tensor) -> Tensor:
        parts = list(aux_3H.double().chunk(3))
        if self.c.algorithm == "eagle3.1":
            parts = [norm(part, self.w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        return self.w["fc.weight"] @ torch.cat(parts)

    def pair(self, token: int, hidden: Tensor) -> Tensor:
        embedded = norm(self.embedding[token], self.w["layers.0.input_layernorm.weight"])
        return torch.cat([embedded, norm(hidden, self.w["layers.0.hidden_norm.weight"])])

    def heads(self, kind: str, pair: Tensor) -> Tensor:
        return (self.w[f"layers.0.self_attn.{kind}_proj.weight"] @ pair).view(-1, self.c.head_dim)

    def key_value(self, pair: Tensor, position: int) -> tuple[Tensor, Tensor]:
        return rotated(self.heads("k", pair), position), self.heads("v", pair)

    def layer(self, pair: Tensor, hidden: Tensor, position: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        query, group, outs = rotated(self.heads("q", pair), position), self.c.num_heads // self.c.num_kv_heads, []
        for h in range(self.c.num_heads):
            scores = torch.stack([query[h] @ k[h // group] / math.sqrt(self.c.head_dim) for k, _ in seen])
            shares = scores.softmax(0)
            outs.append(sum(share * v[h // group] for share, (_, v) in zip(shares, seen, strict=True)))
        u = hidden + self.w["layers.0.self_attn.o_proj.weight"] @ torch.cat(outs)
        inner = norm(u, self.w["layers.0.post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(self.w["layers.0.mlp.gate_proj.weight"] @ inner)
        return u + self.w["layers.0.mlp.down_proj.weight"] @ (gate * (self.w["layers.0.mlp.up_proj.weight"] @ inner))

    def normed(self, u: Tensor) -> Tensor:
        return norm(u, self.w["norm.weight"])


def counts_at(mask: list[int], p: int, k: int, rule: LabelRule) -> bool:
    if rule == "serving":
        return all(m < len(mask) and mask[m] for m in range(p + 1, p + 3 + k))
    read = p + 1 + k if rule == "speculators" else p + k
    return p + 1 + k < len(mask) and bool(mask[read])


def plain_loss(
    drafter: Drafter, teacher: Teacher, samples: MemorySamples, objective: Objective, rule: LabelRule
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, gradients by name)."""
    plain, rows = Plain(drafter), list[tuple[list[Tensor], list[Tensor], list[bool]]]()
    one, zero = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for sample in samples.samples:
        ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
        final = {int(i): state for i, state in zip(sample.final_index, sample.final, strict=True)}
        g = [plain.combined(a) for a in sample.aux]
        first = [plain.key_value(plain.pair(ids[p + 1], g[p]), p + 1) for p in range(len(ids) - 1)]
        for p in range(len(ids) - 1):
            valid = [counts_at(mask, p, k, rule) for k in range(objective.steps)]
            hidden, seen, distances, overlaps = g[p], first[: p + 1], [], []
            for k in range(objective.steps):
                if not any(valid[k:]):
                    distances.append(zero)
                    overlaps.append(one)
                    continue
                pair = plain.pair(ids[p + 1 + k], hidden)
                if k:
                    seen = [*seen, plain.key_value(pair, p + 1 + k)]
                u = plain.layer(pair, hidden, p + 1 + k, seen)
                hidden = plain.normed(u) if drafter.config.algorithm == "eagle3.1" else u
                logits = plain.w["lm_head.weight"] @ plain.normed(u)
                if not valid[k]:
                    distances.append(zero)
                    overlaps.append(one)
                    continue
                y = final[p + 1 + k].double()
                y = norm(y, teacher.norm_H.double()) if teacher.final == "pre" else y
                target = (teacher.head_VdH.double() @ y).softmax(0)
                q = logits.softmax(0)
                overlap = torch.minimum(target, q).sum()
                entropy = -(target * target.log()).sum()
                ce = -(target * q.log()).sum()
                share = (-3 * overlap.detach()).exp()
                values = {"soft_ce": ce, "kl": ce - entropy, "tv": 1 - overlap}
                values["lk"] = share * values["kl"] + (1 - share) * values["tv"]
                distances.append(values[objective.loss])
                overlaps.append(overlap)
            if any(valid):
                rows.append((distances, overlaps, valid))
    numerator, denominator = zero, zero
    powers = [objective.decay**k if objective.step_weights == "decay" else 1.0 for k in range(objective.steps)]
    for distances, overlaps, valid in rows:
        alive = one
        for k in range(objective.steps):
            if not valid[k]:
                continue
            weight = (
                alive.detach() / objective.steps if objective.step_weights == "survival" else powers[k] / sum(powers)
            )
            alive = alive * overlaps[k]
            missing = objective.expected_length_weight / objective.steps * (1 - alive)
            numerator = numerator + weight * distances[k] + missing
            denominator = denominator + weight
    loss = numerator / denominator
    loss.backward()
    return loss.detach(), {n: w.grad if w.grad is not None else torch.zeros_like(w) for n, w in plain.w.items()}
