"""Same data, same steps: what the demo's drafter is worth, and how long it takes, beside two other ways to train it.

The demo's own job (`examples/smollm2`): its prompts answered by the real small verifier, its draft vocabulary, batches,
epochs and learning rates. Ours steps by `drafter.step` and flat AdamW. The others start from the same weights and take
the same batches in the same order, with torch's backward pass, clip and AdamW:

    speculators   that library's module on the batches of its own collator; ours takes its objective for this pair:
                  kl, frozen head, its label rule
    plain         `drafter.reference`, the loss by plain autograd, with the demo's own objective

Judged is what serving would see: the acceptance length on prompts of the test split, decoded for real. Each pair is trained
from several seeds (of the weights and of the order of samples), because training is as noisy as the choice of prompts: two
runs that differ in rounding alone ended .015 apart, seeds of one trainer up to .07. The difference is paired by seed and
prompt; its interval is a bootstrap that draws seeds anew and prompts anew (2,000 resamples, 95 %). Equal trainers have zero
inside it. A bootstrap over few seeds is narrower than the truth (by the root of 2/3 with three), so the difference of every
seed is printed too.
Seconds are those of the steps alone; batches are made before, for all alike.

    python benchmarks/trainer_parity.py [--seeds 3] [--only speculators|plain] [--small] [--out FOLDER]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rows import ROOT, Row, command_line, publish, real_verifier
from torch import Tensor

from eagle3_core.bench.cases import CASES, Work
from eagle3_core.bench.implementations import peer_module
from eagle3_core.data.templates import Chat
from eagle3_core.data.tokensets import TokenSet
from eagle3_core.data.vocab import Counts, choose
from eagle3_core.drafter.build import build
from eagle3_core.drafter.chains import LabelRule
from eagle3_core.drafter.flat import FlatWeights
from eagle3_core.drafter.losses import LossName, Objective
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.reference import reference_loss
from eagle3_core.drafter.step import batch_loss
from eagle3_core.drafter.testing import MemorySample, MemorySamples
from eagle3_core.drafter.verifier_parts import Teacher, VerifierParts
from eagle3_core.evaluate.decode import Measured, measure
from eagle3_core.jobs.sections.training import Training
from eagle3_core.jobs.spec import VerifierSpec
from eagle3_core.shards.format import kept_positions
from eagle3_core.train.feed import Feed, Pass
from eagle3_core.train.optim import FlatAdamW, clipped, learning_rate
from eagle3_core.verifier.base import Decoding, Generated
from eagle3_core.verifier.transformers import TransformersVerifier

EXAMPLE = ROOT / "examples/smollm2"
RESAMPLES = 2000
HELD_OUT_PER_TASK = 60
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Recipe:
    """One way to pose the work: what is minimised, over which labels."""

    drafter: Drafter
    """Untrained."""
    teacher: Teacher
    feed: Feed
    samples: MemorySamples
    objective: Objective
    training: Training

    def order(self) -> list[Pass]:
        """The batches of all epochs, one a step."""
        return [batch for epoch in range(self.training.epochs) for batch in self.feed.batches(epoch)]

    def rates(self) -> list[float]:
        """The learning rate of every step."""
        t, total = self.training, len(self.order())
        how: dict[str, Any] = {
            "peak": t.lr, "schedule": t.scheduler, "warmup_ratio": t.warmup_ratio, "min_ratio": t.min_lr_ratio
        }  # fmt: skip
        return [learning_rate(step, total, **how) for step in range(total)]

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return sum(self.feed.tokens_in(batch) for batch in self.order())


Trained = tuple[Drafter, float]
"""The drafter, and the seconds of its steps."""


def train_ours(recipe: Recipe) -> Trained:
    """By this library, as `train.replica` does."""
    flat, t = FlatWeights(recipe.drafter, CPU, torch.float32), recipe.training
    adam = FlatAdamW(flat, t.betas, t.weight_decay)
    # speculators' loss is a sum over the steps and ours a mean, so a norm of 1 there is 1/K here; AdamW sees no factor.
    limit = t.clip / (t.ttt_steps if recipe.objective.loss == "kl" else 1)
    batches = {batch: recipe.feed.load(batch) for batch in set(recipe.order())}
    began = time.perf_counter()
    for batch, rate in zip(recipe.order(), recipe.rates(), strict=True):
        flat.clear()
        numerator, denominator, _ = batch_loss(flat.drafter, recipe.teacher, batches[batch], recipe.objective)
        numerator.backward()
        gradient_N = flat.gradient()
        norm = torch.linalg.vector_norm(gradient_N, dtype=torch.float32).double()
        adam.step(gradient_N, clipped(norm, denominator, limit)[1], rate)
    return flat.drafter, time.perf_counter() - began


def train_plain(recipe: Recipe) -> Trained:
    """By plain autograd and torch's own optimizer."""
    like = recipe.drafter
    weights = {n: w.detach().clone().requires_grad_(w.requires_grad) for n, w in like.weights.items()}
    drafter = Drafter.assemble(like.config, weights, like.embedding_VH, like.d2t_Vd, like.t2d_V)
    batches = {batch: recipe.feed.load(batch) for batch in set(recipe.order())}

    def loss_of(batch: Pass) -> Tensor:
        numerator, denominator, _ = reference_loss(drafter, recipe.teacher, batches[batch], recipe.objective)
        return numerator / denominator

    return drafter, _torch_steps(recipe, [w for w in weights.values() if w.requires_grad], loss_of)


def train_speculators(recipe: Recipe) -> Trained:
    """By speculators' module, on batches that its own collator packs."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    like, t = recipe.drafter, recipe.training
    work = Work(CASES["C1024"], like, recipe.teacher, recipe.samples)
    module, how = peer_module(work, CPU, "sdpa"), resolve_loss_config("kl_div", "eager")
    collate = CollateFn(t.batch_tokens, like.config.hidden_size, dtype=torch.float32, preprocess=shift_batch)
    batches = {b: _collated(collate, [recipe.samples.samples[i] for i in b]) for b in set(recipe.order())}

    def loss_of(batch: Pass) -> Tensor:
        return cast("Tensor", module(**batches[batch], ttt_steps=t.ttt_steps, loss_config=how)[1])

    seconds = _torch_steps(recipe, [p for p in module.parameters() if p.requires_grad], loss_of)
    named = dict(module.named_parameters())
    weights = {name: named[name].detach().clone() for name in like.weights}
    return Drafter.assemble(like.config, weights, like.embedding_VH, like.d2t_Vd, like.t2d_V), seconds


def _torch_steps(recipe: Recipe, trained: Sequence[Tensor], loss_of: Callable[[Pass], Tensor]) -> float:
    """The steps by torch's backward pass, clip and AdamW; their seconds."""
    t = recipe.training
    adam = torch.optim.AdamW(trained, lr=t.lr, betas=t.betas, weight_decay=t.weight_decay, fused=True)
    began = time.perf_counter()
    for batch, rate in zip(recipe.order(), recipe.rates(), strict=True):
        adam.zero_grad(set_to_none=True)
        loss_of(batch).backward()
        torch.nn.utils.clip_grad_norm_(trained, t.clip)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
    return time.perf_counter() - began


def _collated(collate: Callable[[list[dict[str, Tensor]]], dict[str, Any]], samples: list[MemorySample]) -> Any:
    return {k: v for k, v in collate([_as_peer(s) for s in samples]).items() if k != "error_records"}


def _as_peer(sample: MemorySample) -> dict[str, Tensor]:
    """A sample as speculators' data set gives it."""
    length = len(sample.input_ids)
    final_TH = torch.zeros(length, sample.final.shape[1])
    final_TH[sample.final_index.long()] = sample.final
    return {
        "input_ids": sample.input_ids.long(), "hidden_states": sample.aux, "verifier_last_hidden_states": final_TH,
        "loss_mask": sample.loss_mask.bool(), "lengths": torch.tensor([length]), "position_ids": torch.arange(length),
    }  # fmt: skip


def prompts(chat: Chat, split: str, per_task: int) -> list[list[int]]:
    """The demo's prompts of `split`, as tokens."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "prompts.jsonl"
        subprocess.run(
            [sys.executable, str(EXAMPLE / "prompts.py"), "--split", split, "--per-task", str(per_task), "--out", out],
            check=True, capture_output=True,
        )  # fmt: skip
        return [chat.prompt(json.loads(line)["messages"]) for line in out.read_text(encoding="utf-8").splitlines()]


def sample_of(answer: Generated) -> MemorySample:
    """An answer with its states, in float32, supervised behind the prompt."""
    assert answer.states is not None
    mask_T = (torch.arange(len(answer.ids)) >= answer.prompt_len).to(torch.uint8)
    kept = kept_positions(mask_T)
    final_TH = answer.states.final.float()
    ids_T = torch.tensor(answer.ids, dtype=torch.int32)
    return MemorySample(ids_T, mask_T, answer.states.aux.float(), final_TH[kept.long()], kept)


def pose(
    verifier: TransformersVerifier, samples: MemorySamples, training: Training, size: int, val_ratio: float,
    *, loss: LossName, rule: LabelRule, train_head: bool,
) -> Recipe:  # fmt: skip
    """The untrained drafter of the job's seed, and what it is to learn."""
    folder, identity = verifier.identity.folder, verifier.identity
    rows = [(str(i), "", s.input_ids.numpy(), s.loss_mask.numpy()) for i, s in enumerate(samples.samples)]
    counted = Counts.of(TokenSet.build(rows), identity.vocab_size)
    chosen = choose(counted.scores_V, size, identity.always_drafted())
    drafter = build(
        folder, algorithm=training.algorithm, init=training.init, aux_layers=samples.contract.aux_layers,
        ttt_steps=training.ttt_steps, d2t_Vd=torch.from_numpy(chosen.d2t_Vd), t2d_V=torch.from_numpy(chosen.t2d_V),
        seed=training.seed, train_lm_head=train_head,
    )  # fmt: skip
    teacher = Teacher.read(VerifierParts(folder), drafter.t2d_V, samples.contract.final)
    feed = Feed(
        samples, steps=training.ttt_steps, rule=rule, batch_tokens=training.batch_tokens, seed=training.seed,
        val_ratio=val_ratio,
    )  # fmt: skip
    return Recipe(drafter, teacher, feed, samples, Objective(training.ttt_steps, loss), training)


Looks = Sequence[Sequence[Measured]]
"""Of each seed, what every prompt came to."""


def paired(ours: Looks, theirs: Looks) -> tuple[float, float, float, float]:
    """(acceptance length of ours, of theirs, ends of their difference's interval), seeds and prompts drawn anew."""
    mine_SP2, reference_SP2 = _counts(ours), _counts(theirs)
    counts_SP4 = np.concatenate([mine_SP2, reference_SP2], axis=2)
    drawn, (seeds, prompts, _) = np.random.default_rng(0), counts_SP4.shape
    found = [_lengths(counts_SP4)]
    for _ in range(RESAMPLES):
        some = counts_SP4[drawn.integers(0, seeds, seeds)]
        found.append(_lengths(some[:, drawn.integers(0, prompts, prompts)]))
    differences = [mine - reference for mine, reference in found[1:]]
    low, high = np.percentile(differences, [2.5, 97.5])
    return *found[0], float(low), float(high)


def _counts(looks: Looks) -> NDArray[np.float64]:
    """[seeds, prompts, 2]: tokens and verify calls, prompts in one order."""
    ordered = [sorted(look, key=lambda m: m.chain.index) for look in looks]
    return np.array([[[m.chain.tokens, m.chain.calls] for m in look] for look in ordered], dtype=np.float64)


def _lengths(counts_SP4: NDArray[np.float64]) -> tuple[float, float]:
    """Acceptance lengths of both, over all seeds and prompts."""
    tokens, calls, their_tokens, their_calls = counts_SP4.sum((0, 1))
    return float(tokens / calls), float(their_tokens / their_calls)


Trainer = Callable[[Recipe], Trained]


def judge(
    name: str, recipes: Sequence[Recipe], trainers: tuple[Trainer, Trainer], look: Callable[[Drafter], list[Measured]]
) -> list[Row]:
    """The rows of one pair of trainers, over all seeds."""
    say = Console(soft_wrap=True, highlight=False).print
    looks: tuple[list[list[Measured]], list[list[Measured]]] = ([], [])
    seconds = [0.0, 0.0]
    for recipe in recipes:
        for i, train in enumerate(trainers):
            drafter, spent = train(recipe)
            looks[i].append(look(drafter))
            seconds[i] += spent
        mine, reference = _lengths(np.concatenate([_counts(side[-1:]) for side in looks], axis=2))
        say(f"{name}, seed {recipe.training.seed}: {mine:.4f} and {reference:.4f}, difference {mine - reference:+.4f}")
    mine, reference, low, high = paired(*looks)
    inside = "inside" if low <= 0 <= high else "OUTSIDE"
    steps = sum(len(recipe.order()) for recipe in recipes)
    say(
        f"{name}: {steps} steps in {seconds[0]:.1f} s, {name} in {seconds[1]:.1f} s; acceptance length {mine:.4f} and "
        f"{reference:.4f}, difference {mine - reference:+.4f}, 95 % of resamples of {len(recipes)} seeds and of prompts "
        f"from {low:+.4f} to {high:+.4f}: zero is {inside}"
    )
    tokens = sum(recipe.tokens for recipe in recipes)
    return [
        Row(f"held-out acceptance length beside {name}", mine, "tokens a verify call", reference),
        Row(f"training beside {name}", tokens / seconds[0], "tokens/s", tokens / seconds[1]),
    ]


def compare(small: bool, seeds: int, only: str | None) -> list[Row]:
    """Make the answers, train the pairs from every seed, measure all."""
    job = json.loads((EXAMPLE / "job.json").read_text(encoding="utf-8"))
    data, regenerate = job["data"], job["data"]["regenerate"]
    training = Training.model_validate(job["training"] | ({"epochs": 1} if small else {}))
    answers, held, new_tokens, size = (
        (2, 1, 6, 64)
        if small
        else (
            data["max_samples"] // 5,
            HELD_OUT_PER_TASK,
            regenerate["max_new_tokens"],
            job["vocab"]["draft_vocab_size"],
        )
    )
    folder = real_verifier()
    verifier = TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype="float32", device="cpu"))
    chat, eos_ids = Chat.of(verifier.identity), verifier.identity.eos_token_ids
    how = Decoding(
        max_new_tokens=new_tokens, batch_size=regenerate["batch_size"], eos_ids=eos_ids, keep_states=True
    )  # fmt: skip
    made = sorted(verifier.generate(prompts(chat, "train", answers), how, lambda **_: None), key=lambda a: a.index)
    samples = MemorySamples(verifier.contract("decode"), tuple(sample_of(answer) for answer in made))
    judged = Decoding(max_new_tokens=new_tokens, batch_size=job["evaluation"]["batch_size"], eos_ids=eos_ids)
    unseen = prompts(chat, "test", held)

    def look(drafter: Drafter) -> list[Measured]:
        return measure(
            verifier, drafter, unseen, judged, num_steps=job["evaluation"]["num_steps"], on_progress=lambda **_: None
        )

    def posed(loss: LossName, rule: LabelRule, *, train_head: bool) -> list[Recipe]:
        """The job from every seed."""
        return [
            pose(
                verifier, samples, training.model_copy(update={"seed": training.seed + i}), size, data["val_ratio"],
                loss=loss, rule=rule, train_head=train_head,
            )
            for i in range(seeds)
        ]  # fmt: skip

    rows: list[Row] = []
    if only != "plain":
        theirs = posed("kl", "speculators", train_head=False)
        rows += judge("speculators", theirs, (train_ours, train_speculators), look)
    if only != "speculators":
        own = posed(training.loss, training.label_rule, train_head=training.train_lm_head)
        rows += judge("plain", own, (train_ours, train_plain), look)
    return rows


def main() -> None:
    """Measure what was asked for."""
    options = command_line(__doc__ or "")
    options.add_argument("--seeds", type=int, default=3, help="trainings of each trainer (default: 3; with --small 2)")
    options.add_argument("--only", choices=("speculators", "plain"), help="one pair")
    asked = options.parse_args()
    publish(Path(sys.argv[0]).stem, compare(asked.small, 2 if asked.small else asked.seeds, asked.only), asked.out)


if __name__ == "__main__":
    main()
