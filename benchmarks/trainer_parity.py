"""Same data, same steps: what the drafter of our trainer is worth beside one trained by speculators' own module.

Both start from the same weights, see the same answers of the real small verifier one by one in the same order, with the
objective and label rule of speculators (kl, frozen head), AdamW and a clipped gradient. Ours steps by `drafter.step` and
flat AdamW, theirs by that library's forward pass, torch's backward, clip and AdamW: the reference.

Judged is what serving would see: the acceptance length on held-out prompts, decoded for real. The difference is paired
by prompt; its interval is a bootstrap over prompts (2,000 resamples, 95 %). Equal trainers have zero inside it.

    python benchmarks/trainer_parity.py [--small] [--out FOLDER]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rows import Row, benchmark, real_verifier
from tokenizers import Tokenizer

from eagle3_core.bench.cases import CASES, Work
from eagle3_core.bench.implementations import peer_batch, peer_module
from eagle3_core.drafter.build import build
from eagle3_core.drafter.flat import FlatWeights
from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.step import batch_loss
from eagle3_core.drafter.testing import MemorySample, MemorySamples, pack
from eagle3_core.drafter.verifier_parts import Teacher, VerifierParts
from eagle3_core.evaluate.decode import Measured, measure
from eagle3_core.jobs.spec import VerifierSpec
from eagle3_core.shards.format import kept_positions
from eagle3_core.train.optim import FlatAdamW, clipped
from eagle3_core.verifier.base import Decoding, Generated
from eagle3_core.verifier.transformers import TransformersVerifier

STEPS, RATE, BETAS, RESAMPLES = 3, 1e-3, (0.9, 0.95), 2000
TOPICS = (
    "boats",
    "birds",
    "a town",
    "two rivers",
    "an old clock",
    "bread",
    "the moon",
    "a train",
    "bees",
    "a lighthouse",
)
ASKED = ("Write a short story about {}.", "Explain {} to a child.", "Write a poem about {}.", "List facts about {}.")


def prompts(tokenizer: Tokenizer, first: int, count: int) -> list[list[int]]:
    """Chat prompts `first` to `first + count` of one list in which none comes twice."""
    texts = [f"{ASKED[i % 4].format(TOPICS[i // 4 % 10])} Use the number {i}." for i in range(first, first + count)]
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts]
    return [tokenizer.encode(chat, add_special_tokens=False).ids for chat in chats]


def sample_of(answer: Generated) -> MemorySample:
    """An answer with its states, in float32, supervised behind the prompt."""
    assert answer.states is not None
    mask_T = (torch.arange(len(answer.ids)) >= answer.prompt_len).to(torch.uint8)
    kept = kept_positions(mask_T)
    final_TH = answer.states.final.float()
    ids_T = torch.tensor(answer.ids, dtype=torch.int32)
    return MemorySample(ids_T, mask_T, answer.states.aux.float(), final_TH[kept.long()], kept)


def fresh(folder: Path, verifier: TransformersVerifier, samples: Sequence[MemorySample], size: int) -> Drafter:
    """An untrained drafter whose vocabulary are the `size` most frequent tokens of the answers."""
    parts = VerifierParts(folder)
    supervised = torch.cat([s.input_ids[s.loss_mask.bool()].long() for s in samples])
    counts_V = torch.bincount(supervised, minlength=len(parts.head()))
    tokens = counts_V.argsort(descending=True, stable=True)[:size].sort().values
    t2d_V = torch.zeros(len(counts_V), dtype=torch.bool)
    t2d_V[tokens] = True
    return build(
        folder, algorithm="eagle3.1", init="random", aux_layers=verifier.contract("decode").aux_layers, ttt_steps=STEPS,
        d2t_Vd=tokens - torch.arange(size), t2d_V=t2d_V, seed=0, train_lm_head=False,
    )  # fmt: skip


def train_ours(work: Work, order: Sequence[MemorySamples]) -> Drafter:
    """One step a sample by this library."""
    flat, objective = FlatWeights(work.drafter, torch.device("cpu"), torch.float32), Objective(STEPS, "kl")
    adam = FlatAdamW(flat, BETAS, 0.0)
    for one in order:
        flat.clear()
        numerator, denominator, _ = batch_loss(flat.drafter, work.teacher, pack(one, STEPS, "speculators"), objective)
        numerator.backward()
        gradient_N = flat.gradient()
        # Their loss is a sum over the steps and ours a mean, so 1 there is 1/K here; AdamW does not see the factor.
        norm = torch.linalg.vector_norm(gradient_N, dtype=torch.float32).double()
        adam.step(gradient_N, clipped(norm, denominator, 1.0 / STEPS)[1], RATE)
    return flat.drafter


def train_theirs(work: Work, order: Sequence[MemorySamples]) -> Drafter:
    """One step a sample by speculators' module."""
    from speculators.losses import resolve_loss_config

    module: Any = peer_module(work, torch.device("cpu"), "sdpa")
    trained = [p for p in module.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
    how = resolve_loss_config("kl_div", "eager")
    for one in order:
        module.zero_grad(set_to_none=True)
        _, loss, _ = module(**peer_batch(one), ttt_steps=STEPS, loss_config=how)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adam.step()
    named, like = dict(module.named_parameters()), work.drafter
    weights = {name: named[name].detach().clone() for name in like.weights}
    return Drafter.assemble(like.config, weights, like.embedding_VH, like.d2t_Vd, like.t2d_V)


def paired(ours: Sequence[Measured], theirs: Sequence[Measured]) -> tuple[float, float, float, float, float]:
    """(acceptance length of ours, of theirs, their difference, its interval's ends)."""
    by_prompt = {m.chain.index: m.chain for m in theirs}
    pairs = [(m.chain, by_prompt[m.chain.index]) for m in ours]
    counts_P4 = np.array([[a.tokens, a.calls, b.tokens, b.calls] for a, b in pairs], dtype=np.float64)
    draws = np.random.default_rng(0).integers(0, len(counts_P4), (RESAMPLES, len(counts_P4)))
    sums_R4 = np.concatenate([counts_P4.sum(0, keepdims=True), counts_P4[draws].sum(1)])
    mine_R, reference_R = sums_R4[:, 0] / sums_R4[:, 1], sums_R4[:, 2] / sums_R4[:, 3]
    low, high = np.percentile((mine_R - reference_R)[1:], [2.5, 97.5])
    return float(mine_R[0]), float(reference_R[0]), float(mine_R[0] - reference_R[0]), float(low), float(high)


def compare(small: bool) -> list[Row]:
    """Make the answers, train both, measure both."""
    answers, held, new_tokens, epochs, size = (3, 2, 6, 1, 16) if small else (200, 60, 64, 5, 2048)
    folder = real_verifier()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    verifier = TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype="float32", device="cpu"))
    how = Decoding(max_new_tokens=new_tokens, batch_size=32, eos_ids=verifier.identity.eos_token_ids, keep_states=True)
    asked = prompts(tokenizer, 0, answers)
    made = sorted(verifier.generate(asked, how, lambda **_: None), key=lambda a: a.index)
    contract, samples = verifier.contract("decode"), [sample_of(answer) for answer in made]
    drafter = fresh(folder, verifier, samples, size)
    teacher = Teacher.read(VerifierParts(folder), drafter.t2d_V, contract.final)
    everything = MemorySamples(contract, tuple(samples))
    work = Work(CASES["C1024"], drafter, teacher, everything)
    rng = np.random.default_rng(0)
    order = [MemorySamples(contract, (samples[i],)) for _ in range(epochs) for i in rng.permutation(len(samples))]
    ways = {"ours": train_ours(work, order), "theirs": train_theirs(work, order)}
    judged = Decoding(max_new_tokens=new_tokens, batch_size=30, eos_ids=verifier.identity.eos_token_ids)
    unseen = prompts(tokenizer, answers, held)
    found = {
        name: list(measure(verifier, one, unseen, judged, num_steps=STEPS, on_progress=lambda **_: None))
        for name, one in ways.items()
    }
    mine, reference, difference, low, high = paired(found["ours"], found["theirs"])
    inside = "inside" if low <= 0 <= high else "OUTSIDE"
    Console().print(
        f"{len(order)} steps; acceptance length {mine:.4f}, reference {reference:.4f}, difference {difference:+.4f}, "
        f"95 % of resamples from {low:+.4f} to {high:+.4f}: zero is {inside}",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    return [Row("held-out acceptance length", mine, "tokens a verify call", reference)]


if __name__ == "__main__":
    benchmark(compare)
