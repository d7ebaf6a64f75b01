"""One training step of a drafter in SmolLM2's shape, against speculators' own forward and backward on the same batch.

Both run in float32 on all cores: 4 chats of 112 tokens, the last 36 the assistant's, draft vocabulary 2,048, three
steps of the training-time test, kl over the same labels. Ours runs only the rows that a loss reads, theirs runs every
position. The weights are the real verifier's: `.venv/bin/python benchmarks/train_step.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from rows import Row, benchmark, rate, real_verifier
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.data import shift_batch

from eagle3_core.drafter.build import build, speculators_module
from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.step import batch_loss
from eagle3_core.drafter.testing import MemorySamples, pack, random_samples
from eagle3_core.drafter.verifier_parts import Teacher, VerifierParts

CHATS, PROMPT, ANSWER, DRAFT_VOCAB, STEPS = 4, 76, 36, 2048, 3


def reference(drafter: Drafter, teacher: Teacher) -> Any:
    """speculators' module with the drafter's weights; its head stays frozen, which favours it."""
    module = speculators_module(drafter.config, None, seed=1)
    with torch.no_grad():
        for name, weight in dict(module.named_parameters()).items():
            if name in drafter.weights:
                weight.copy_(drafter.weights[name])
        module.embed_tokens.weight.copy_(drafter.embedding_VH)
        module.verifier_lm_head.weight.copy_(teacher.head_VdH)
        module.verifier_norm.weight.copy_(teacher.norm_H)
    module.load_vocab_mappings(drafter.t2d_V, drafter.d2t_Vd)
    return module


def their_batch(samples: MemorySamples) -> dict[str, torch.Tensor]:
    """The batch as that library's collator makes it."""
    items: list[dict[str, torch.Tensor]] = []
    for number, sample in enumerate(samples.samples):
        length = len(sample.input_ids)
        final = torch.zeros(length, sample.final.shape[1])
        final[sample.final_index.long()] = sample.final
        item = shift_batch(
            {
                "input_ids": sample.input_ids.long(), "hidden_states": sample.aux, "verifier_last_hidden_states": final,
                "loss_mask": sample.loss_mask.bool(), "lengths": torch.tensor([length]), "position_ids": torch.arange(length),
            }
        )  # fmt: skip
        item.pop("lengths")
        items.append({**item, "document_ids": torch.full((length - 1,), number)})
    return {key: torch.cat([item[key] for item in items])[None] for key in items[0]}


def measure(small: bool) -> list[Row]:
    """Supervised tokens per second, ours and speculators' own."""
    chats, rounds = (1, 1) if small else (CHATS, 6)
    folder = real_verifier()
    t2d = torch.zeros(49152, dtype=torch.bool)
    t2d[torch.randperm(49152, generator=torch.Generator().manual_seed(0))[:DRAFT_VOCAB]] = True
    d2t = t2d.nonzero().flatten() - torch.arange(DRAFT_VOCAB)
    drafter = build(
        folder,
        algorithm="eagle3.1",
        init="random",
        aux_layers=(2, 15, 27),
        ttt_steps=STEPS,
        d2t_Vd=d2t,
        t2d_V=t2d,
        seed=0,
    )
    teacher = Teacher.read(VerifierParts(folder), t2d, "pre")
    samples = random_samples(["0" * PROMPT + "1" * ANSWER] * chats, hidden=576, vocab=49152)
    module, inputs = reference(drafter, teacher), their_batch(samples)

    def theirs() -> float:
        _, loss, _ = module(**inputs, ttt_steps=STEPS, loss_config=resolve_loss_config("kl_div", "eager"))
        loss.backward()
        return float(chats * ANSWER)

    batch = pack(samples, STEPS, "serving")

    def ours() -> float:
        numerator, denominator, _ = batch_loss(drafter, teacher, batch, Objective(STEPS, "kl"))
        (numerator / denominator).backward()
        return float(chats * ANSWER)

    return [Row("training step", rate(ours, rounds), "supervised tokens/s", rate(theirs, rounds))]


if __name__ == "__main__":
    benchmark(measure)
