"""Token counts -> the draft vocabulary, and how much of the verifier's answers it covers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from eagle3_core.data.tokensets import TokenSet
from eagle3_core.data.vocab import Counts, DraftVocab, VocabCoverage, choose, estimated_coverage
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.jobs.wire import Commit
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.posted import posted_verifier

VOCAB_FILE = "vocab.safetensors"
PARTS = ("reading the answers", "counting tokens", "estimating the coverage", "storing the vocabulary")
"""What the stage does, as its progress says it."""
WARN_COVERAGE = 0.95
"""Below it more than one chain of three tokens in seven breaks on a token that the drafter cannot propose."""


def vocab(ctx: StageContext) -> Commit:
    """Choose the drafter's tokens from the training answers. Raises VocabSize, VocabCoverage."""
    ctx.begin("reading the answers", PARTS)
    samples = _samples(ctx)
    verifier = posted_verifier(ctx)
    requested, always = ctx.spec.vocab.draft_vocab_size, verifier.always_drafted()
    ctx.begin("counting tokens", PARTS)
    chosen = choose(Counts.of(samples, verifier.vocab_size).scores_V, requested, always)
    ctx.begin("estimating the coverage", PARTS)
    coverage, fair = estimated_coverage(samples, verifier.vocab_size, requested, always)
    clamped = requested is not None and len(chosen) < requested
    _require_coverage(ctx.spec, coverage, len(chosen))
    warnings = list(_doubts(coverage, chosen, requested if clamped else None))
    for text in warnings:
        ctx.log(text, level="warning")
    result: dict[str, Any] = {
        "draft_vocab_size": len(chosen),
        "requested": requested,
        "distinct_tokens": chosen.distinct,
        "coverage": coverage,
        "coverage_on": "held_out" if fair else "counted",
        "clamped": clamped,
    }
    ctx.log(
        f"{len(chosen)} draft tokens cover {coverage:.1%} of the supervised tokens ({result['coverage_on']} samples)"
    )
    ctx.metric("coverage", coverage, 0)
    ctx.begin("storing the vocabulary", PARTS)
    writer = ctx.writer()
    writer.add_file(VOCAB_FILE, _write(chosen, ctx.scratch))
    return ctx.done(writer.commit(result), {**result, "warnings": warnings})


def _samples(ctx: StageContext) -> TokenSet:
    """The texts that are trained on: the verifier's own answers, or prepare's conversations."""
    if ctx.spec.data.regenerate.enabled:
        entries = [manifest.file("answers.safetensors") for manifest in ctx.manifests("generate")]
    else:
        entries = [manifest.file("train.safetensors") for manifest in ctx.manifests("prepare")]
    return TokenSet.concat([TokenSet.load(ctx.fetch(entry)) for entry in entries])


def _require_coverage(spec: JobSpec, coverage: float, size: int) -> None:
    if coverage < spec.vocab.min_coverage:
        raise VocabCoverage(
            f"{size} draft tokens cover {coverage:.1%} of the supervised tokens, vocab.min_coverage is "
            f"{spec.vocab.min_coverage:.1%}",
            remedy="raise vocab.draft_vocab_size, add training samples, or lower vocab.min_coverage",
            pointer="/vocab/min_coverage",
        )


def _doubts(coverage: float, chosen: DraftVocab, clamped_from: int | None) -> Iterator[str]:
    """Warnings: where the job gets fewer tokens than it asked for, and where chains will often end for want of one."""
    if clamped_from is not None:
        yield (
            f"vocab.draft_vocab_size {clamped_from} is more than the {chosen.distinct} distinct tokens that the data holds: "
            f"the drafter gets {len(chosen)}"
        )
    if coverage < WARN_COVERAGE:
        more = "add training samples"
        way = more if clamped_from is not None else f"raise vocab.draft_vocab_size, or {more}"
        yield (
            f"{len(chosen)} draft tokens cover {coverage:.1%} of the supervised tokens: every other one ends a chain, so {way}"
        )


def _write(chosen: DraftVocab, folder: Path) -> Path:
    path = folder / VOCAB_FILE
    save_file({"d2t": np.ascontiguousarray(chosen.d2t_Vd), "t2d": np.ascontiguousarray(chosen.t2d_V)}, path)
    return path
