"""Conversations -> tokenised samples and held-out prompts. Pure in the files, the verifier's tokenizer and the job.

It needs no torch. Every file must still be what it was when the job was posted, and before anything costs compute the
bytes that the hidden states may need are set against the store's room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from eagle3_core.data.corpus import Source, held_out_prompts, training_samples
from eagle3_core.data.datasets import Tally
from eagle3_core.data.rows import DatasetFault
from eagle3_core.data.samples import Sampler
from eagle3_core.data.sources import fingerprint, resolve
from eagle3_core.data.templates import FIXED_DAY, Chat
from eagle3_core.data.tokensets import TokenSet
from eagle3_core.errors import AerieError
from eagle3_core.jobs.spec import DatasetSpec, JobSpec
from eagle3_core.jobs.wire import Commit
from eagle3_core.stages.context import StageContext
from eagle3_core.verifier.folder import POINTER, VerifierChanged, VerifierTokenizer, refusal
from eagle3_core.verifier.identity import Identity, inspect
from eagle3_core.verifier.layers import resolve_layers

TRAIN_FILE, EVAL_FILE = "train.safetensors", "eval.safetensors"


class DatasetChanged(DatasetFault):
    """A data set holds something else than when the job was posted."""

    code, status = "dataset.changed", 409


class StoreTooSmall(AerieError):
    """The object store has no room for the hidden states of this job."""

    code, status = "store.too_small", 507


def prepare(ctx: StageContext) -> Commit:
    """Write `train.safetensors` and `eval.safetensors` (token sets).

    Raises DatasetFault (`dataset.*`), DataTooShort, DataAllMasked, HeldOutOverlap, StoreTooSmall, and `verifier.*`.
    """
    spec = ctx.spec
    verifier = _verifier(ctx)
    train_sources = _sources(ctx, spec.datasets, "/datasets")
    eval_sources = _sources(ctx, spec.evaluation.prompts, "/evaluation/prompts")
    sampler = Sampler(Chat.of(verifier), min(spec.data.max_seq_len, verifier.max_position_embeddings))
    held_out = held_out_prompts(
        eval_sources, sampler, max_prompts=spec.evaluation.max_prompts, bad_rows_limit=spec.data.bad_rows_limit
    )
    warnings = list(_eval_warnings(sampler))
    sampler = Sampler(sampler.chat, sampler.limit)
    train, dropped = training_samples(train_sources, spec.data, sampler, held_out, _reporting(ctx))
    for tokens in (train, held_out):
        _check_ids(tokens, verifier)
    needed = states_bytes(train, spec, verifier.hidden_size)
    _check_room(ctx, needed)
    warnings += _train_warnings(sampler, dropped)
    for text in warnings:
        ctx.log(text, "warning")
    return _commit(ctx, verifier, train, held_out, dropped, needed, warnings)


def states_bytes(train: TokenSet, spec: JobSpec, hidden: int) -> int:
    """Most bytes that the states of `train` can need: per token 3 H of aux states, id and mask; H where labels are read.

    Before the answers exist, each is taken to be as long as the job allows.
    """
    element = 4 if spec.verifier.dtype == "float32" else 2
    if spec.data.regenerate.enabled:
        longest = spec.data.regenerate.max_new_tokens
        lengths = np.minimum(train.lengths + longest, np.maximum(spec.data.max_seq_len, train.lengths))
        tokens, final = int(lengths.sum()), int((lengths - train.lengths + 1).sum())
    else:
        mask = np.pad(train.loss_mask.astype(bool), 1)
        tokens, final = train.tokens, int((mask[:-2] | mask[1:-1] | mask[2:]).sum())
    return tokens * (3 * hidden * element + 5) + final * (hidden * element + 4)


def _verifier(ctx: StageContext) -> Identity:
    folder = resolve(ctx.spec.verifier.model, ctx.file_roots, pointer=POINTER)
    verifier = inspect(folder, revision=ctx.spec.verifier.revision)
    if verifier.digest != (expected := ctx.assignment.sources.get("verifier", "")):
        raise refusal(
            VerifierChanged,
            f"{folder} is verifier {verifier.digest[:16]}, the job was posted for {expected[:16]}",
            "put the old checkpoint back, or post the job again",
        )
    return verifier


def _sources(ctx: StageContext, specs: Sequence[DatasetSpec], pointer: str) -> list[Source]:
    """The job's data sets, each still what it was when the job was posted. Raises DatasetChanged."""
    sources: list[Source] = []
    for i, spec in enumerate(specs):
        source = Source(spec, resolve(spec.uri, ctx.file_roots, pointer=f"{pointer}/{i}/uri"), f"{pointer}/{i}/uri")
        next(source.usable(Tally(), max_lines=1), None)  # a missing file says so itself
        have, expected = fingerprint(source.path), ctx.assignment.sources.get(spec.uri, "")
        if have != expected:
            raise DatasetChanged(
                f"{spec.uri} hashes to {have[:16]}, it was {expected[:16]} when the job was posted",
                remedy="put the old file back, or post the job again",
                pointer=source.pointer,
            )
        sources.append(source)
    return sources


def _reporting(ctx: StageContext) -> Callable[[int, int], None]:
    """Progress every thousandth, and a stop honoured between any two conversations."""

    def report(done: int, total: int) -> None:
        ctx.check()
        if done % max(1, total // 1000) == 0 or done == total:
            ctx.progress(done, total, "samples")

    return report


def _check_ids(tokens: TokenSet, verifier: Identity) -> None:
    if (largest := int(tokens.input_ids.max())) >= verifier.vocab_size:
        raise refusal(
            VerifierTokenizer,
            f"the tokenizer makes token {largest}, the verifier's embedding has {verifier.vocab_size} rows",
            "use tokenizer and weights of one and the same release of the model",
        )


def _check_room(ctx: StageContext, needed: int) -> None:
    free = ctx.store.free_bytes()
    if free is not None and needed > free:
        raise StoreTooSmall(
            f"the hidden states need up to {needed / 1e9:.2f} GB, the store has {free / 1e9:.2f} GB left",
            remedy="free space, or lower data.max_samples, data.max_seq_len or data.regenerate.max_new_tokens",
            pointer="/data",
            needed_bytes=needed,
            free_bytes=free,
        )


def _eval_warnings(sampler: Sampler) -> Iterator[str]:
    if sampler.chat.template.prints_date:
        yield f"the chat template may print the date; samples are rendered as of {FIXED_DAY:%d %b %Y}"
    for reason, count in sorted(sampler.dropped.items()):
        yield f"{count} held-out prompts were left out: {reason}"


def _train_warnings(sampler: Sampler, dropped: dict[str, int]) -> Iterator[str]:
    if dropped:
        yield "lines left out: " + ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    if sampler.cut:
        yield f"{sampler.cut} samples were cut at {sampler.limit} tokens"
    if sampler.rewritten:
        yield f"{sampler.rewritten} earlier answers are not trained: the chat template renders them differently later on"
    if sampler.unended:
        yield f"{sampler.unended} answers end with no token that the verifier stops at (eos {sorted(sampler.chat.eos_token_ids)})"


def _commit(
    ctx: StageContext, verifier: Identity, train: TokenSet, held_out: TokenSet, dropped: dict[str, int], needed: int,
    warnings: list[str],
) -> Commit:  # fmt: skip
    """Store both sets. The manifest says only what the samples are: neither the room they need nor which layers will be
    captured reaches the keys of later stages."""
    writer = ctx.writer()
    for name, tokens in ((TRAIN_FILE, train), (EVAL_FILE, held_out)):
        path = ctx.scratch / name
        tokens.save(path)
        writer.add_file(name, path, samples=len(tokens), tokens=tokens.tokens)
    summary: dict[str, Any] = {
        "samples": len(train),
        "eval_prompts": len(held_out),
        "tokens": train.tokens,
        "supervised_tokens": train.supervised_tokens,
        "dropped": dropped,
        "tasks": dict(sorted(Counter(train.tasks).items())),
    }
    layers = resolve_layers(ctx.spec.extraction.aux_layers, verifier.num_layers)
    result = {
        **summary,
        "states_bytes": needed,
        "verifier": {
            "name": verifier.name,
            "hidden_size": verifier.hidden_size,
            "num_layers": verifier.num_layers,
            "vocab_size": verifier.vocab_size,
            "aux_layers": list(layers),
        },
        "warnings": warnings,
    }
    return ctx.done(writer.commit(summary), result)
