"""Hidden-state shards -> a trained drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from eagle3_core.drafter.build import build
from eagle3_core.drafter.model import CONFIG_FILE, TENSORS_FILE, Drafter
from eagle3_core.drafter.verifier_parts import Teacher, VerifierParts
from eagle3_core.jobs.spec import Training
from eagle3_core.jobs.wire import Commit
from eagle3_core.shards.manifest import contracts, shared_contract
from eagle3_core.shards.reader import ShardSet
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.posted import reading_verifier
from eagle3_core.train.checkpoint import Checkpoints
from eagle3_core.train.cost import Weights
from eagle3_core.train.feed import Feed, Samples
from eagle3_core.train.launch import launch
from eagle3_core.train.loop import Trained, Trainer
from eagle3_core.train.memory import USABLE, Demand, gib
from eagle3_core.train.ranks import Ranks
from eagle3_core.train.replica import Place
from eagle3_core.train.speed import sentence
from eagle3_core.verifier.contract import ContractMismatch, agree, differences
from eagle3_core.verifier.device import NoGpu, pick_device

FEW_STEPS = 100
"""Steps below which a training is warned about. Three, on 48 prompts with the defaults, gave an acceptance length of 1.004, the
demo's 698 one of 2.2; nothing between them was measured."""
START = "start"
"""Folder of the untrained drafter, for the ranks."""


def train(ctx: StageContext) -> Commit:
    """Train a drafter on the captured states, going on from this unit's newest checkpoint if there is one."""
    sides = contracts(ctx.manifests("extract"))
    contract, warnings = agree(sides), differences(sides)
    for text in warnings:
        ctx.log(text, level="warning")
    device = pick_device(ctx.spec.verifier.device)
    ranks = _ranks(ctx, device)
    folder = ctx.scratch
    if device == "cuda":
        ctx.warm.release()  # a verifier kept by an earlier unit would lie where training needs room
    if ranks > 1:
        folder = ctx.scratch / "ranks"
        told = train_together(ctx, folder, ranks, device)
    else:
        told = train_at(ctx, torch.device(device), Ranks(), new_drafter(ctx))
    speed = told.pop("speed")
    writer = ctx.writer()
    for name in (TENSORS_FILE, CONFIG_FILE):
        writer.add_file(name, folder / "drafter" / name)
    timings = {name: float(value) for name, value in speed.items()}
    commit = writer.commit(told, contract=contract.model_dump(mode="json"), timings=timings)
    return ctx.done(commit, told | {"speed": speed, "warnings": warnings})


def train_together(ctx: StageContext, folder: Path, ranks: int, device: Literal["cpu", "cuda"]) -> dict[str, Any]:
    """Train in `ranks` processes over the new folder `folder`, where the first leaves the drafter; what it says of it.

    The untrained drafter is made here, once: what makes it (speculators' own module) takes longer to import than to run.
    """
    folder.mkdir()
    new_drafter(ctx).save(folder / START)
    return launch(ctx, folder, ranks, device)


def train_at(ctx: StageContext, device: torch.device, ranks: Ranks, drafter: Drafter) -> dict[str, Any]:
    """Train on `device` as one of `ranks`; the first saves the drafter in its scratch folder and says what became of it."""
    training = ctx.spec.training
    shards = ShardSet(ctx.store, ctx.manifests("extract"), ctx.scratch)
    with reading_verifier(ctx) as verifier:
        teacher = Teacher.read(VerifierParts(verifier), drafter.t2d_V, shards.contract.final)
    feed = _feed(ctx, shards, training, Weights.of(drafter.config))
    dtype = _dtype(training, device)
    checkpoints = Checkpoints(
        ctx.store, tenant=ctx.assignment.tenant, provenance=ctx.assignment.key, fence=ctx.assignment.fence,
        keep=training.keep_checkpoints, scratch=ctx.scratch, warn=lambda text: ctx.log(text, level="warning"),
    )  # fmt: skip
    place = Place(device, dtype, ranks, _room(training, device))
    _plan_memory(ctx, place.demand(drafter.config, training), feed, place.room)
    trainer = Trainer(ctx, drafter, teacher, feed, training, checkpoints, place)
    ctx.log(
        f"{len(feed.train)} samples, {feed.supervised_tokens} supervised tokens an epoch, {len(feed.held_out)} held out, "
        f"{feed.dropped} without anything to learn; {trainer.total_steps} steps in {dtype} on {device} "
        f"with {torch.get_num_threads()} threads" + (f", {ranks.size} ranks" if ranks.size > 1 else "")
    )
    if trainer.total_steps < FEW_STEPS and training.max_steps is None:
        ctx.log(_too_short(trainer.total_steps, training), level="warning")
    trained = trainer.run()
    ctx.log(sentence(trained.speed))
    if ranks.first:
        trained.drafter.save(ctx.scratch / "drafter")
    return _result(trained, feed, ranks)


def _too_short(steps: int, training: Training) -> str:
    return (
        f"the training is over after {steps} step{'s' * (steps > 1)}, and a drafter needs hundreds: give more prompts, raise "
        f"training.epochs ({training.epochs}), or put fewer tokens into a step (training.batch_tokens is "
        f"{training.batch_tokens}, and no sample may be longer: training.max_seq_len)"
    )


def _feed(ctx: StageContext, samples: Samples, training: Training, weights: Weights) -> Feed:
    feed = Feed(
        samples, steps=training.ttt_steps, rule=training.label_rule, batch_tokens=training.batch_tokens,
        seed=training.seed, val_ratio=ctx.spec.data.val_ratio, max_seq_len=training.max_seq_len, weights=weights,
    )  # fmt: skip
    if feed.dropped:
        ctx.log(f"{feed.dropped} of {len(samples)} samples have no chain to learn and are left out", level="warning")
    return feed


def new_drafter(ctx: StageContext) -> Drafter:
    """An untrained drafter for the verifier that the states came from. Raises ContractMismatch, VerifierChanged."""
    training, posted = ctx.spec.training, ctx.assignment.sources["verifier"]
    contract = shared_contract(ctx.manifests("extract"))
    if posted != contract.verifier:
        raise ContractMismatch(
            f"the states were captured from verifier {contract.verifier[:16]} ({contract.verifier_name}), "
            f"the job was posted for {posted[:16]}",
            remedy="use the verifier that the states came from, or capture them again",
            pointer="/verifier/model",
        )
    (manifest,) = ctx.manifests("vocab")
    vocab = load_file(ctx.fetch(manifest.file("vocab.safetensors")))
    with reading_verifier(ctx) as folder:
        return build(
            folder, algorithm=training.algorithm, init=training.init, aux_layers=contract.aux_layers,
            ttt_steps=training.ttt_steps, d2t_Vd=vocab["d2t"], t2d_V=vocab["t2d"], seed=training.seed,
            train_lm_head=training.train_lm_head,
        )  # fmt: skip


def started_drafter(ctx: StageContext, folder: Path) -> Drafter:
    """The untrained drafter that `train_together` left in `folder`, every weight but a frozen head requiring a gradient."""
    with reading_verifier(ctx) as verifier:
        drafter = Drafter.load(folder / START, verifier)
    for name, weight in drafter.weights.items():
        weight.requires_grad_(ctx.spec.training.train_lm_head or name != "lm_head.weight")
    return drafter


def _ranks(ctx: StageContext, device: Literal["cpu", "cuda"]) -> int:
    """Processes that train: as many as GPUs were asked for and are here. Raises NoGpu."""
    asked = ctx.spec.training.gpus
    if asked is None:
        return 1
    here = torch.cuda.device_count() if device == "cuda" else 0
    if here == 0:
        raise NoGpu(
            f"training.gpus is {asked}, and this machine shows no GPU",
            remedy="run the train stage on a worker with GPUs, or leave training.gpus out",
            pointer="/training/gpus",
        )
    if here < asked:
        ctx.log(f"training.gpus is {asked}, this machine shows {here}: training on {here}", level="warning")
    return min(asked, here)


def _dtype(training: Training, device: torch.device) -> torch.dtype:
    """In which precision products are made."""
    automatic = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(training.dtype, automatic)


def _room(training: Training, device: torch.device) -> int | None:
    """Bytes of memory to plan with. Not what happens to be free: slices must not depend on the moment."""
    if training.memory_gib is not None:
        return int(training.memory_gib * 2**30)
    if device.type == "cpu":
        return None
    return int(USABLE * torch.cuda.get_device_properties(device).total_memory)


def _plan_memory(ctx: StageContext, demand: Demand, feed: Feed, room: int | None) -> None:
    """Say what the largest pass of the first epoch will take. Raises NoRoom if nothing helps."""
    heaviest = max((feed.rows_of(batch) for batch in feed.batches(0)), key=demand.peak)
    slices = demand.slices(heaviest, room)
    cut = f", in {slices} slices" if slices > 1 else ""
    ctx.log(f"the largest pass takes about {gib(demand.peak(heaviest, slices=slices)):.2f} GiB{cut}")


def _result(trained: Trained, feed: Feed, ranks: Ranks) -> dict[str, Any]:
    return {
        "ranks": ranks.size,
        "steps": trained.steps,
        "epochs": trained.epochs,
        "samples": len(feed.train),
        "held_out_samples": len(feed.held_out),
        "dropped_samples": feed.dropped,
        "supervised_tokens": trained.supervised_tokens,
        "loss": trained.loss,
        "val_loss": trained.val_loss,
        "digest": trained.drafter.digest(),
        "speed": trained.speed,
    }
