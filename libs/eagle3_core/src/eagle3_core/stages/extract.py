"""Tokens -> hidden-state shards, by prefill.

Runs where no pass of `generate` left states behind: conversations that are trained on as they are, and answers whose
states are wanted from other layers.
"""

from __future__ import annotations

import time

from eagle3_core.data.tokensets import TokenSet
from eagle3_core.jobs.room import exact_need
from eagle3_core.jobs.wire import Commit
from eagle3_core.shards.writer import ShardWriter
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.generate import ANSWERS_FILE, commit_states
from eagle3_core.stages.posted import posted_verifier
from eagle3_core.stages.warm import reporting, warm_verifier

BATCH_TOKENS = 4096
"""Padded tokens of one prefill pass (or one sequence): larger ones gain nothing on a CPU and little on a GPU."""


def extract(ctx: StageContext) -> Commit:
    """Capture the states of one slice of samples."""
    samples = _samples(ctx)
    verifier = warm_verifier(ctx)
    ctx.require_room(exact_need(samples.tokens, samples.labelled, verifier.identity.hidden_size))
    contract = verifier.contract("prefill")
    extraction = ctx.spec.extraction
    shards = ShardWriter(ctx.scratch, contract, codec=extraction.codec, shard_bytes=extraction.shard_bytes)
    started = time.monotonic()
    sequences = [samples.sample(i)[0].tolist() for i in range(len(samples))]
    progress = reporting(ctx, len(samples), "samples")
    for captured in verifier.capture(sequences, batch_tokens=BATCH_TOKENS, on_progress=progress):
        i = captured.index
        shards.add(samples.ids[i], samples.tasks[i], sequences[i], samples.sample(i)[1].tolist(), captured.states)
    posted_verifier(ctx)
    output = commit_states(ctx, shards, contract, ctx.assignment.key, time.monotonic() - started)
    return Commit(output=output, seconds=0.0)


def _samples(ctx: StageContext) -> TokenSet:
    """This unit's samples: generate's unit of the same index, or a slice of prepare's."""
    unit = ctx.assignment.unit
    if ctx.spec.data.regenerate.enabled:
        generated = ctx.manifests("generate")
        own = generated[0] if len(generated) == 1 else generated[unit.index]
        return TokenSet.load(ctx.fetch(own.file(ANSWERS_FILE)))
    (prepared,) = ctx.manifests("prepare")
    return TokenSet.load(ctx.fetch(prepared.file("train.safetensors"))).slice(unit.start, unit.stop)
