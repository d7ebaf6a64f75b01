"""The training step on a GPU against its reference: every gradient, in float32 and bf16, up to 8,192 tokens.

The reference is `drafter.reference` in float32: plain autograd, attention and head in slices. Compared are the loss and
each weight's gradient, by ||ours - reference|| / ||reference||. Random inputs and weights, real layer shapes. Tolerances:

- float32: loss 1e-5, gradients 2e-4 (sums of thousands of terms in another order); under `tv` 2e-2, because its slope
  jumps where the drafter's and the verifier's probability of a token meet, and rounding decides on which side;
- bf16: loss 2e-3, gradients 5e-2, or 1.15 times what the reference itself gives with bf16 products. A random drafter of
  seven normed steps is chaotic: there rounding alone moves a gradient by a third, whoever computes it.

    python benchmarks/gpu_exactness.py [--out FILE.json] [--only TEXT]

Ends with exit status 1 if any case is off.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from eagle3_core.drafter.chains import LabelRule, plan_chains
from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.model import Drafter, tensor_shapes
from eagle3_core.drafter.reference import reference_loss
from eagle3_core.drafter.step import PackedBatch, batch_loss
from eagle3_core.drafter.verifier_parts import Teacher

TOLERANCE = {torch.float32: (1e-5, 2e-4), torch.bfloat16: (2e-3, 5e-2)}
"""(loss, any weight's gradient), relative."""
OF_ROUNDING = 1.15
"""Times the reference's own error in bf16."""
JUMPS = 2e-2
"""A gradient's tolerance in float32 under tv."""


SOFT_CE = Objective(7)


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    tokens: int
    mask: str
    documents: int = 1
    rule: LabelRule = "serving"
    objective: Objective = SOFT_CE
    algorithm: str = "eagle3.1"
    kv_heads: int = 8
    train_head: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    hidden: int = 4096
    head_dim: int = 128


LENGTH = Objective(7, "lk", "survival", expected_length_weight=4.0)
CASES = (
    Case("serving, 2 documents", 1024, "span70", 2, dtypes=(torch.float32, torch.bfloat16)),
    Case("eagle3, frozen head, speculators' rule", 1024, "span30", 3, "speculators", Objective(7, "kl"), "eagle3",
         train_head=False, dtypes=(torch.float32, torch.bfloat16)),
    Case("survival, lk, expected length", 1024, "span70", 2, objective=LENGTH, dtypes=(torch.float32, torch.bfloat16)),
    Case("tv, decay, scattered", 1024, "iid70", 2, "speculators", Objective(7, "tv", "decay"),
         dtypes=(torch.float32, torch.bfloat16)),
    Case("multi-head, scattered, specforge's rule", 1024, "iid30", 2, "specforge", kv_heads=32),
    Case("one token", 1024, "last", 1, "speculators", dtypes=(torch.float32, torch.bfloat16)),
    Case("head size 64", 1024, "span70", 4, hidden=2048, head_dim=64, dtypes=(torch.float32, torch.bfloat16)),
    Case("head size 80: attention in torch", 1024, "span70", 4, hidden=2560, head_dim=80),
    Case("long, many documents", 4096, "span30", 40),
    Case("long", 8192, "span70", 1, "speculators"),
    Case("long, everything supervised", 8192, "span100", 1, "speculators", algorithm="eagle3", train_head=False),
)  # fmt: skip


def mask_of(name: str, tokens: int) -> np.ndarray:
    """bool [T]: `spanNN` in turns of 512 tokens, `iidNN` scattered, `last` only the last token."""
    rng = np.random.default_rng(5)
    if name == "last":
        return np.arange(tokens) == tokens - 1
    density = int(name.lstrip("spanid")) / 100
    if name.startswith("iid"):
        return rng.random(tokens) < density
    mask, at = np.zeros(tokens, dtype=bool), 0
    while at < tokens:
        turn = int(512 * rng.uniform(0.5, 1.5))
        mask[at + int(turn * (1 - density)) : at + turn] = True
        at += turn
    return mask


def build(case: Case) -> tuple[Drafter, Teacher, PackedBatch]:
    """Random weights of a trained drafter's size, a teacher with opinions, random states; float32 on the GPU."""
    heads = case.hidden // case.head_dim
    config = DrafterConfig(
        algorithm=case.algorithm, hidden_size=case.hidden, intermediate_size=case.hidden * 7 // 2, num_heads=heads,
        num_kv_heads=min(case.kv_heads, heads), head_dim=case.head_dim, hidden_act="silu", rms_norm_eps=1e-5,
        initializer_range=0.02, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        max_position_embeddings=32768, vocab_size=64000, draft_vocab_size=32000, aux_layers=(2, 16, 29),
        ttt_steps=case.objective.steps, verifier_model_type="llama", verifier_architectures=("LlamaForCausalLM",),
    )  # fmt: skip
    g = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    weights = {
        name: (1 + 0.2 * drawn(*shape) if len(shape) == 1 else 0.02 * drawn(*shape)).bfloat16().float()
        for name, shape in tensor_shapes(config).items()
    }
    for name, weight in weights.items():
        weight.requires_grad_(case.train_head or name != "lm_head.weight")
    t2d = torch.arange(64000, device="cuda") % 2 == 0
    d2t = t2d.nonzero().flatten() - torch.arange(32000, device="cuda")
    drafter = Drafter.assemble(config, weights, drawn(64000, case.hidden).bfloat16(), d2t, t2d)
    teacher = Teacher(
        torch.ones(case.hidden, device="cuda"), (0.05 * drawn(32000, case.hidden)).bfloat16().float(), 1e-5, "pre"
    )
    t = case.tokens
    offsets = np.linspace(0, t, case.documents + 1).astype(np.int64)
    plan = plan_chains(mask_of(case.mask, t), offsets, case.objective.steps, case.rule)
    batch = PackedBatch(
        torch.randint(0, 64000, (t,), generator=g, device="cuda"), offsets, drawn(t, 3 * case.hidden).bfloat16(),
        drawn(t, case.hidden).bfloat16(), torch.arange(t, device="cuda"), plan,
    )  # fmt: skip
    return drafter, teacher, batch


def passed(
    drafter: Drafter, teacher: Teacher, batch: PackedBatch, objective: Objective, dtype: torch.dtype, loss: Any
) -> Any:
    """(loss, gradients by name, counts) with products in `dtype`."""
    for weight in drafter.weights.values():
        weight.grad = None
    numerator, denominator, counts = loss(drafter.at("cuda", dtype), teacher.to("cuda", dtype), batch, objective)
    (numerator / denominator.detach()).backward()
    found = {n: w.grad.clone() for n, w in drafter.weights.items() if w.grad is not None}
    return float(numerator.detach() / denominator), found, counts


def relative(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[str, float]:
    """The worst weight and its error; a gradient that is not a number is infinitely wrong."""
    errors = {n: float((have[n] - want[n]).norm() / want[n].norm()) for n in want}
    worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
    return worst, errors[worst] if errors[worst] == errors[worst] else float("inf")


def compare(case: Case, console: Console) -> list[dict[str, Any]]:
    """The rows of one case."""
    drafter, teacher, batch = build(case)
    started = time.perf_counter()
    want_loss, want, want_counts = passed(drafter, teacher, batch, case.objective, torch.float32, reference_loss)
    reference_s = time.perf_counter() - started
    rows: list[dict[str, Any]] = []
    for dtype in case.dtypes:
        loss, have, counts = passed(drafter, teacher, batch, case.objective, dtype, batch_loss)
        again = passed(drafter, teacher, batch, case.objective, dtype, batch_loss)[1]
        repeats = all(torch.equal(have[n], again[n]) for n in have)
        del again
        name, error = relative(have, want)
        off = abs(loss - want_loss) / abs(want_loss)
        plain = None
        loss_room, room = TOLERANCE[dtype]
        if dtype == torch.bfloat16:
            plain = relative(passed(drafter, teacher, batch, case.objective, dtype, reference_loss)[1], want)[1]
            room = max(room, OF_ROUNDING * plain)
        elif case.objective.loss == "tv":
            room = JUMPS
        row = {
            "case": case.name, "tokens": case.tokens, "mask": case.mask, "dtype": str(dtype), "loss": loss,
            "loss_error": off, "max_grad_error": error, "worst": name, "reference_bf16": plain,
            "hits": counts.hits_K.tolist(), "reference_hits": want_counts.hits_K.tolist(), "repeats_bitwise": repeats,
            "ok": bool(off <= loss_room and error <= room and repeats), "reference_s": reference_s,
        }  # fmt: skip
        beside = "" if plain is None else f" (reference in bf16 {plain:.1e})"
        console.print(
            f"{'ok ' if row['ok'] else 'OFF'} {case.name}, T {case.tokens} {case.mask} {str(dtype)[6:]}: loss {off:.1e}, "
            f"gradients {error:.1e} at {name}{beside}, same bits again: {repeats}",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
        rows.append(row)
    return rows


def main() -> int:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="the cases whose name holds this text")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    console, rows = Console(), list[dict[str, Any]]()
    for case in CASES:
        if options.only in case.name:
            rows += compare(case, console)
            torch.cuda.empty_cache()
    document = {"machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}", "rows": rows}
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
