"""Drafter + verifier -> what the drafter is worth, on one slice of the held-out prompts.

Every prompt is answered twice, with and without the drafter, by this process; with `verifier.backend: sglang` twice more
by the engine that will serve, which must keep what the first two promise (`evaluate.promise`). Unit results hold one row
a prompt; the report and the gate's verdict are made from all units together (`evaluate.report`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from eagle3_core.data.tokensets import TokenSet
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.verifier_parts import VerifierParts
from eagle3_core.evaluate.costs import measure_costs
from eagle3_core.evaluate.decode import Measured, measure
from eagle3_core.evaluate.lengths import acceptance_length
from eagle3_core.evaluate.losslessness import compare
from eagle3_core.evaluate.ngrams import SeenNgrams, loops
from eagle3_core.jobs.wire import Commit
from eagle3_core.objects.manifest import Manifest
from eagle3_core.shards.manifest import contract_of
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.generate import ANSWERS_FILE
from eagle3_core.stages.posted import posted_verifier, reading_verifier
from eagle3_core.stages.served import longest, passes, served
from eagle3_core.stages.trained import trained_drafter
from eagle3_core.stages.warm import reporting, warm_verifier
from eagle3_core.verifier.base import Decoding
from eagle3_core.verifier.contract import CaptureContract, agree, differences
from eagle3_core.verifier.transformers import TransformersVerifier

COST_CONTEXT = 100
"""Tokens of context at which costs are measured."""


def evaluate(ctx: StageContext) -> Commit:
    """Measure the drafter on one slice of the held-out prompts: as promised, and with backend sglang as served too."""
    unit = ctx.assignment.unit
    (prepared,), (trained,) = ctx.manifests("prepare"), ctx.manifests("train")
    prompts = TokenSet.load(ctx.fetch(prepared.file("eval.safetensors"))).slice(unit.start, unit.stop)
    with reading_verifier(ctx) as folder:
        drafter = trained_drafter(ctx, trained, VerifierParts(folder))
    promised = _promise(ctx, prompts, drafter, prepared, trained)
    result: dict[str, Any] = {"rows": promised.rows, "costs": promised.costs, "warnings": promised.warnings}
    if ctx.spec.verifier.backend == "sglang":
        parts, serving = served(ctx, drafter, _ids(prompts), promised.how, device=promised.device)
        rows = [{**row, "served": part} for row, part in zip(promised.rows, parts, strict=True)]
        result |= {"rows": rows, "serving": serving}
    posted_verifier(ctx)
    writer = ctx.writer()
    answered = zip(result["rows"], promised.answers, strict=True)
    writer.add_json("prompts.json", [{**row, "answer": answer} for row, answer in answered])
    timings = {"measure_s": promised.seconds} | {k: v for k, v in promised.costs.items() if k.endswith("_ms")}
    ref = writer.commit({"rows": result["rows"]}, contract=promised.contract, timings=timings)
    return ctx.done(ref, result)


@dataclass(frozen=True)
class Promised:
    """What the chain decoder found."""

    rows: list[dict[str, Any]]
    answers: list[list[int]]
    costs: dict[str, Any]
    seconds: float
    how: Decoding
    device: Literal["cpu", "cuda"]
    contract: dict[str, Any]
    """Of the verifier that measured."""
    warnings: list[str]


def _promise(ctx: StageContext, prompts: TokenSet, drafter: Drafter, prepared: Manifest, trained: Manifest) -> Promised:
    """Draft and verify in this process. Raises ContractMismatch where the drafter is another verifier's."""
    evaluation, verifier = ctx.spec.evaluation, warm_verifier(ctx)
    warnings = _compared(ctx, contract_of(trained), verifier)
    here = drafter.at(verifier.device, verifier.dtype)
    how = Decoding(
        max_new_tokens=evaluation.max_new_tokens,
        batch_size=evaluation.batch_size,
        eos_ids=verifier.identity.eos_token_ids,
        max_seq_len=longest(ctx.spec, verifier.identity.max_position_embeddings),
    )
    started = time.monotonic()
    progress = reporting(ctx, len(prompts) * passes(ctx.spec), "prompts")
    measured = measure(verifier, here, _ids(prompts), how, num_steps=evaluation.num_steps, on_progress=progress)
    seconds = time.monotonic() - started
    seen = SeenNgrams()
    seen.add(_training_answers(ctx, prepared))
    rows = [_row(ctx, verifier, prompts, m, seen) for m in measured]
    ctx.metric("acceptance_length_of_unit", acceptance_length(rows)["mean"], ctx.assignment.unit.stop)
    context = max((m.plain.ids for m in measured), key=len)[:COST_CONTEXT]
    costs = measure_costs(verifier, here, context, evaluation.num_steps)
    device = "cuda" if verifier.device.type == "cuda" else "cpu"
    answers, contract = [m.chain.answer for m in measured], verifier.contract("decode").model_dump(mode="json")
    return Promised(rows, answers, costs, seconds, how, device, contract, warnings)


def _compared(ctx: StageContext, trained: CaptureContract, verifier: TransformersVerifier) -> list[str]:
    """How the verifier that measures differs from the one that the drafter was trained on. Raises ContractMismatch.

    Its pass is taken for the same: drafts are verified by decoding, whichever pass the training states came from.
    """
    sides = [("the drafter", trained), ("the running verifier", verifier.contract(trained.capture_pass))]
    agree(sides)
    warnings = differences(sides)
    for text in warnings:
        ctx.log(text, level="warning")
    return warnings


def _ids(prompts: TokenSet) -> list[list[int]]:
    return [prompts.sample(i)[0].tolist() for i in range(len(prompts))]


def _training_answers(ctx: StageContext, prepared: Manifest) -> Iterator[list[int]]:
    """The assistant's turns of the training samples: the verifier's own answers where it wrote them."""
    if ctx.spec.data.regenerate.enabled:
        files = [manifest.file(ANSWERS_FILE) for manifest in ctx.manifests("generate")]
    else:
        files = [prepared.file("train.safetensors")]
    for entry in files:
        samples = TokenSet.load(ctx.fetch(entry))
        for i in range(len(samples)):
            ids, mask = samples.sample(i)
            edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
            yield from (ids[start:stop].tolist() for start, stop in edges)


def _row(
    ctx: StageContext, verifier: TransformersVerifier, prompts: TokenSet, measured: Measured, seen: SeenNgrams
) -> dict[str, Any]:
    """What is kept of one prompt: counts and judgements, no text."""
    chain, plain = measured.chain, measured.plain
    prompt, answer = chain.ids[: chain.prompt_len], chain.answer
    verdict = compare(
        verifier, prompt, answer, plain.ids[plain.prompt_len :], ctx.spec.near_tie_logit_gap
    )  # fmt: skip
    if not verdict.equal:
        ctx.log(
            f"prompt {prompts.ids[chain.index]}: the drafted answer differs from token {verdict.first_difference} on, "
            f"logit gap {verdict.gap}",
            level="info" if verdict.near_tie else "warning",
        )
    hits, total = seen.count(answer)
    return {
        "id": prompts.ids[chain.index],
        "task": prompts.tasks[chain.index],
        "tokens": chain.tokens,
        "calls": chain.calls,
        "proposed": chain.proposed,
        "accepted": chain.accepted,
        "lossless": verdict.equal or verdict.near_tie,
        "near_tie": verdict.near_tie,
        "looping": loops(answer),
        "seen_ngrams": hits,
        "ngrams": total,
        "answer_tokens": len(answer),
    }
