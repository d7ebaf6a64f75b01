"""Tokens -> hidden-state shards, by prefill.

Runs where no pass of `generate` left states behind: conversations that are trained on as they are, and answers whose
states are wanted from other layers.
"""

from __future__ import annotations

import time

from eagle3_core.data.tokensets import TokenSet
from eagle3_core.drafter.verifier_parts import VerifierParts
from eagle3_core.jobs.room import exact_need
from eagle3_core.jobs.wire import Commit
from eagle3_core.shards.writer import ShardWriter
from eagle3_core.stages.capturing import capturing
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.generate import ANSWERS_FILE, commit_states
from eagle3_core.stages.posted import posted_verifier, reading_verifier
from eagle3_core.stages.warm import reporting
from eagle3_core.verifier.endpoint_states import EndpointStates
from eagle3_core.verifier.recheck import Recheck
from eagle3_core.verifier.sglang import SGLangVerifier
from eagle3_core.verifier.transformers import TransformersVerifier

BATCH_TOKENS = 4096
"""Padded tokens of one prefill pass (or one sequence): larger ones gain nothing on a CPU and little on a GPU."""


def extract(ctx: StageContext) -> Commit:
    """Capture the states of one slice of samples."""
    samples = _samples(ctx)
    verifier = capturing(ctx)
    ctx.require_room(exact_need(samples.tokens, samples.labelled, verifier.identity.hidden_size))
    contract = verifier.contract("prefill")
    extraction = ctx.spec.extraction
    shards = ShardWriter(ctx.scratch, contract, codec=extraction.codec, shard_bytes=extraction.shard_bytes)
    recheck = None if _own_answers(ctx, verifier) else Recheck(len(samples))
    started = time.monotonic()
    sequences = [samples.sample(i)[0].tolist() for i in range(len(samples))]
    progress = reporting(ctx, len(samples), "samples")
    for captured in verifier.capture(sequences, batch_tokens=BATCH_TOKENS, on_progress=progress):
        i = captured.index
        name, mask = samples.ids[i], samples.sample(i)[1].tolist()
        if recheck is not None:
            recheck.add(name, sequences[i], mask if _greedy(ctx) else [], captured.states, captured.following)
        shards.add(name, samples.tasks[i], sequences[i], mask, captured.states.stored())
    judged = {} if recheck is None else _judge(ctx, recheck)
    posted_verifier(ctx)
    output = commit_states(ctx, shards, ctx.assignment.key, time.monotonic() - started, judged)
    return Commit(output=output, seconds=0.0)


def _own_answers(ctx: StageContext, verifier: TransformersVerifier | SGLangVerifier | EndpointStates) -> bool:
    """Whether the process that gives the states would have written the same answers: then nothing is held against another."""
    return verifier.keeps_states and ctx.spec.verifier.endpoint is None


def _greedy(ctx: StageContext) -> bool:
    """Whether the samples' answers are the verifier's own most likely tokens."""
    regenerate = ctx.spec.data.regenerate
    return regenerate.enabled and regenerate.temperature == 0


def _judge(ctx: StageContext, recheck: Recheck) -> dict[str, int]:
    """Hold states that another process captured against what the verifier said. Raises StatesDisagree."""
    with reading_verifier(ctx) as folder:
        found = recheck.judge(VerifierParts(folder), ctx.spec.near_tie_logit_gap)
    ctx.log(f"the states give the verifier's next token at {found['agreed']} of {found['checked']} checked positions")
    return found


def _samples(ctx: StageContext) -> TokenSet:
    """This unit's samples: generate's unit of the same index, or a slice of prepare's."""
    unit = ctx.assignment.unit
    if ctx.spec.data.regenerate.enabled:
        generated = ctx.manifests("generate")
        own = generated[0] if len(generated) == 1 else generated[unit.index]
        return TokenSet.load(ctx.fetch(own.file(ANSWERS_FILE)))
    (prepared,) = ctx.manifests("prepare")
    return TokenSet.load(ctx.fetch(prepared.file("train.safetensors"))).slice(unit.start, unit.stop)
