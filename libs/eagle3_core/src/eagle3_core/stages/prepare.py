"""Conversations -> tokenised samples and held-out prompts. Pure in the files, the verifier's tokenizer and the job.

It needs no torch. Every file must still be what it was when the job was posted, and stay so while it is read. Template and
tokenizer, which come with the checkpoint, run in a confined process.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from zlib import decompress

import numpy as np

from eagle3_core.data import conversations
from eagle3_core.data.corpus import Source, few_prompts, held_out_prompts, training_samples
from eagle3_core.data.datasets import Tally
from eagle3_core.data.encoding import LIMITS, ConfinedEncoder
from eagle3_core.data.rows import DatasetFault, DatasetMissing, fault
from eagle3_core.data.samples import Sampler
from eagle3_core.data.sources import fingerprint, resolve
from eagle3_core.data.templates import FIXED_DAY, prints_date
from eagle3_core.data.tokensets import TokenSet
from eagle3_core.jobs.room import Need, exact_need, need_of_answers
from eagle3_core.jobs.spec import DatasetSpec, JobSpec
from eagle3_core.jobs.wire import Commit
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.posted import posted_verifier
from eagle3_core.verifier.folder import VerifierTokenizer, refusal
from eagle3_core.verifier.identity import Identity
from eagle3_core.verifier.layers import resolve_layers

TRAIN_FILE, EVAL_FILE = "train.safetensors", "eval.safetensors"


class DatasetChanged(DatasetFault):
    """A data set holds something else than when the job was posted."""

    code, status = "dataset.changed", 409


def prepare(ctx: StageContext) -> Commit:
    """Write `train.safetensors` and `eval.safetensors` (token sets), and the conversations of the former where they are asked.

    Raises DatasetFault (`dataset.*`), DataTooShort, DataAllMasked, HeldOutOverlap, and `verifier.*`.
    """
    spec = ctx.spec
    verifier = posted_verifier(ctx)
    train_sources = _sources(ctx, spec.datasets, "/datasets")
    eval_sources = _sources(ctx, spec.evaluation.prompts, "/evaluation/prompts")
    limit = verifier.longest(spec.data.max_seq_len)
    with ConfinedEncoder(verifier, LIMITS, ctx.spec.data.template_arguments) as encoder:
        sampler = Sampler(encoder, limit)
        held_out, keys = held_out_prompts(
            eval_sources, sampler, max_prompts=spec.evaluation.max_prompts, bad_rows_limit=spec.data.bad_rows_limit
        )
        warnings = list(_eval_warnings(sampler, len(held_out), verifier))
        sampler = Sampler(encoder, limit, keep_messages=spec.data.regenerate.ask == "messages")
        train, dropped, messages = training_samples(train_sources, spec.data, sampler, keys, _reporting(ctx))
    _check_unchanged(ctx, [*train_sources, *eval_sources])
    for tokens in (train, held_out):
        _check_ids(tokens, verifier)
    warnings += _train_warnings(sampler, dropped, verifier)
    for text in warnings:
        ctx.log(text, "warning")
    return _commit(ctx, verifier, train, held_out, messages, dropped, warnings)


def states_need(train: TokenSet, spec: JobSpec, hidden: int) -> Need:
    """Bytes that the states of `train` need; before the answers exist, of the shortest and of the longest that can come."""
    if spec.data.regenerate.enabled:
        longest = spec.data.regenerate.max_new_tokens
        whole = np.minimum(train.lengths + longest, np.maximum(spec.data.max_seq_len, train.lengths))
        return need_of_answers(train.tokens, len(train), int((whole - train.lengths).sum()), hidden)
    return exact_need(train.tokens, train.labelled, hidden)


def _sources(ctx: StageContext, specs: Sequence[DatasetSpec], pointer: str) -> list[Source]:
    """The job's data sets, each still what it was when the job was posted. Raises DatasetChanged."""
    sources: list[Source] = []
    for i, spec in enumerate(specs):
        source = Source(spec, resolve(spec.uri, ctx.file_roots, pointer=f"{pointer}/{i}/uri"), f"{pointer}/{i}/uri")
        next(source.usable(Tally(), beginning=True), None)  # a missing file says so itself
        _check_unchanged(ctx, [source])
        sources.append(source)
    return sources


def _check_unchanged(ctx: StageContext, sources: Sequence[Source]) -> None:
    """Raise DatasetChanged unless every file is what it was when the job was posted."""
    for source in sources:
        uri = source.spec.uri
        try:
            have, expected = fingerprint(source.path), ctx.assignment.sources.get(uri, "")
        except OSError as error:
            raise fault(DatasetMissing, f"{source.path} cannot be read: {error.strerror}", source.pointer) from None
        if have != expected:
            raise DatasetChanged(
                f"{uri} hashes to {have[:16]}, it was {expected[:16]} when the job was posted",
                remedy="put the old file back, or post the job again",
                pointer=source.pointer,
            )


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


def _eval_warnings(sampler: Sampler, prompts: int, verifier: Identity) -> Iterator[str]:
    if prints_date(verifier.chat_template):
        yield f"the chat template may print the date; samples are rendered as of {FIXED_DAY:%d %b %Y}"
    for reason, count in sorted(sampler.dropped.items()):
        yield f"{count} held-out prompts were left out: {reason}"
    yield from few_prompts(prompts)


def _train_warnings(sampler: Sampler, dropped: dict[str, int], verifier: Identity) -> Iterator[str]:
    if dropped:
        yield "lines left out: " + ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    if sampler.cut:
        yield f"{sampler.cut} samples were cut at {sampler.limit} tokens"
    if sampler.rewritten:
        yield f"{sampler.rewritten} earlier answers are not trained: the chat template renders them differently later on"
    if sampler.unended:
        yield f"{sampler.unended} answers end with no token that the verifier stops at (eos {list(verifier.eos_token_ids)})"


def _commit(
    ctx: StageContext, verifier: Identity, train: TokenSet, held_out: TokenSet, messages: list[bytes],
    dropped: dict[str, int], warnings: list[str],
) -> Commit:  # fmt: skip
    """Store both sets. The manifest says only what the samples are: neither the room they need nor which layers will be
    captured reaches the keys of later stages."""
    writer = ctx.writer()
    for name, tokens in ((TRAIN_FILE, train), (EVAL_FILE, held_out)):
        path = ctx.scratch / name
        tokens.save(path)
        writer.add_file(name, path, samples=len(tokens), tokens=tokens.tokens)
    if messages:
        path = ctx.scratch / conversations.MESSAGES_FILE
        conversations.save(
            path, ((n, json.loads(decompress(kept))) for n, kept in zip(train.ids, messages, strict=True))
        )
        writer.add_file(path.name, path, samples=len(train))
    summary: dict[str, Any] = {
        "samples": len(train),
        "eval_prompts": len(held_out),
        "tokens": train.tokens,
        "supervised_tokens": train.supervised_tokens,
        "dropped": dropped,
        "tasks": dict(sorted(Counter(train.tasks).items())),
    }
    layers = resolve_layers(ctx.spec.extraction.aux_layers, verifier.num_layers)
    need = states_need(train, ctx.spec, verifier.hidden_size)
    result = {
        **summary,
        "states_bytes": need.most,
        "states_bytes_least": need.least,
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
