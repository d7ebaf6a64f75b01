"""Hidden-state shards -> a trained drafter."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file

from eagle3_core.data.sources import resolve
from eagle3_core.drafter.build import build
from eagle3_core.drafter.model import CONFIG_FILE, TENSORS_FILE, Drafter
from eagle3_core.drafter.verifier_parts import Teacher, VerifierParts
from eagle3_core.jobs.spec import Training
from eagle3_core.jobs.wire import Commit
from eagle3_core.shards.reader import ShardSet
from eagle3_core.stages.context import StageContext
from eagle3_core.train.checkpoint import Checkpoints
from eagle3_core.train.feed import Feed, Samples
from eagle3_core.train.loop import Trained, Trainer
from eagle3_core.verifier.contract import CaptureContract, ContractMismatch
from eagle3_core.verifier.identity import inspect


def train(ctx: StageContext) -> Commit:
    """Train a drafter on the captured states, going on from this unit's newest checkpoint if there is one."""
    training = ctx.spec.training
    shards = ShardSet(ctx.store, ctx.manifests("extract"), ctx.scratch)
    feed = _feed(ctx, shards, training)
    drafter, teacher = _drafter_and_teacher(ctx, shards.contract)
    device, dtype = _place(ctx, training)
    checkpoints = Checkpoints(
        ctx.store, tenant=ctx.assignment.tenant, provenance=ctx.assignment.key, fence=ctx.assignment.fence,
        keep=training.keep_checkpoints, scratch=ctx.scratch, warn=lambda text: ctx.log(text, level="warning"),
    )  # fmt: skip
    trainer = Trainer(ctx, drafter, teacher, feed, training, checkpoints, device=device, dtype=dtype)
    ctx.log(
        f"{len(feed.train)} samples, {feed.supervised_tokens} supervised tokens an epoch, {len(feed.held_out)} held out, "
        f"{feed.dropped} without anything to learn; {trainer.total_steps} steps in {dtype} on {device} "
        f"with {torch.get_num_threads()} threads"
    )
    trained = trainer.run()
    result = _result(trained, feed)
    trained.drafter.save(ctx.scratch / "drafter")
    writer = ctx.writer()
    for name in (TENSORS_FILE, CONFIG_FILE):
        writer.add_file(name, ctx.scratch / "drafter" / name)
    return ctx.done(writer.commit(result, contract=shards.contract.model_dump(mode="json")), result)


def _feed(ctx: StageContext, samples: Samples, training: Training) -> Feed:
    feed = Feed(
        samples, steps=training.ttt_steps, rule=training.label_rule, batch_tokens=training.batch_tokens,
        seed=training.seed, val_ratio=ctx.spec.data.val_ratio, max_seq_len=training.max_seq_len,
    )  # fmt: skip
    if feed.dropped:
        ctx.log(f"{feed.dropped} of {len(samples)} samples have no chain to learn and are left out", level="warning")
    return feed


def _drafter_and_teacher(ctx: StageContext, contract: CaptureContract) -> tuple[Drafter, Teacher]:
    """A new drafter and its teacher, for the verifier that the states came from. Raises ContractMismatch."""
    training = ctx.spec.training
    folder = resolve(ctx.spec.verifier.model, ctx.file_roots, pointer="/verifier/model")
    if (digest := inspect(folder).digest) != contract.verifier:
        raise ContractMismatch(
            f"the states were captured from verifier {contract.verifier[:16]} ({contract.verifier_name}), "
            f"{folder} is {digest[:16]}",
            remedy="use the verifier that the states came from, or capture them again",
            pointer="/verifier/model",
        )
    (manifest,) = ctx.manifests("vocab")
    vocab = load_file(ctx.fetch(manifest.file("vocab.safetensors")))
    drafter = build(
        folder, algorithm=training.algorithm, init=training.init, aux_layers=contract.aux_layers,
        ttt_steps=training.ttt_steps, d2t_Vd=vocab["d2t"], t2d_V=vocab["t2d"], seed=training.seed,
        train_lm_head=training.train_lm_head,
    )  # fmt: skip
    return drafter, Teacher.read(VerifierParts(folder), vocab["t2d"], contract.final)


def _place(ctx: StageContext, training: Training) -> tuple[torch.device, torch.dtype]:
    """Where training runs, and in which precision its products are made."""
    wish = ctx.spec.verifier.device
    gpu = wish == "cuda" or (wish == "auto" and torch.cuda.is_available())
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(
        training.dtype, torch.bfloat16 if gpu else torch.float32
    )
    return torch.device("cuda" if gpu else "cpu"), dtype


def _result(trained: Trained, feed: Feed) -> dict[str, Any]:
    return {
        "steps": trained.steps,
        "epochs": trained.epochs,
        "samples": len(feed.train),
        "held_out_samples": len(feed.held_out),
        "dropped_samples": feed.dropped,
        "supervised_tokens": trained.supervised_tokens,
        "loss": trained.loss,
        "val_loss": trained.val_loss,
        "digest": trained.drafter.digest(),
    }
