"""What can be known about a job before any compute: that its inputs exist, fit together, and what they hash to.

It runs when a job is posted, in the API's process and in seconds: no torch, no weights, the first thousand lines of each
data set. What it refuses would otherwise fail after hours; what is only unwise becomes a warning. Its digests are what
stage keys are made of, and prepare compares them again, so a file that is changed in between is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.data.corpus import Source
from eagle3_core.data.datasets import SAMPLE_LINES, Tally, probe
from eagle3_core.data.samples import Dropped, HeldOutOverlap, Sampler
from eagle3_core.data.sources import fingerprint, resolve
from eagle3_core.data.templates import Chat
from eagle3_core.drafter.config import drafter_config, read_text_config
from eagle3_core.errors import AerieError
from eagle3_core.jobs.spec import DatasetSpec, JobSpec
from eagle3_core.train.memory import Demand, Rows
from eagle3_core.verifier import identity
from eagle3_core.verifier.folder import POINTER
from eagle3_core.verifier.identity import Identity
from eagle3_core.verifier.layers import resolve_layers

LLAMA_LAYER = frozenset({
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
    "self_attn.v_proj.weight", "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
    "mlp.down_proj.weight",
})  # fmt: skip
"""Tensors of a Llama decoder layer. The drafter's layer can be a copy of one that has these and no others."""


class VocabSize(AerieError):
    """The draft vocabulary is larger than the verifier's."""

    code, status = "vocab.size", 422


class InitUnsupported(AerieError):
    """The drafter's layer cannot be a copy of this verifier's."""

    code, status = "training.init", 422


@dataclass(frozen=True)
class Preflight:
    """A job that may start."""

    sources: dict[str, str]
    """Hex BLAKE3 of what lies outside the house: `verifier` (its identity) and one of each data set, by its URI."""
    warnings: tuple[str, ...]
    verifier: Identity
    aux_layers: tuple[int, int, int]
    """The layer inputs that will be captured."""
    train_peak_bytes: int
    """Most memory that training takes: of a GPU, or of the process where it trains on a CPU (`train.memory`)."""


def preflight(spec: JobSpec, file_roots: Sequence[Path]) -> Preflight:
    """Check `spec` against its verifier and its data.

    Raises an AerieError with the pointer of the offending field: `verifier.*`, `vocab.size`, `training.init`,
    `source.*`, `dataset.*`, `data.*`, `evaluation.overlap`, `drafter.verifier`, `training.memory`.
    """
    folder = resolve(spec.verifier.model, file_roots, pointer=POINTER)
    verifier = identity.inspect(folder, revision=spec.verifier.revision)
    layers = resolve_layers(spec.extraction.aux_layers, verifier.num_layers)
    _check_vocab(spec, verifier)
    _check_init(spec, verifier)
    train = [_source(d, f"/datasets/{i}/uri", file_roots) for i, d in enumerate(spec.datasets)]
    prompts = [_source(d, f"/evaluation/prompts/{i}/uri", file_roots) for i, d in enumerate(spec.evaluation.prompts)]
    warnings = [*_warnings(spec, verifier), *_check_lines(spec, train, prompts)]
    sources = {source.spec.uri: fingerprint(source.path) for source in (*train, *prompts)}
    _check_held_out(spec, sources)
    _check_usable(spec, verifier, train, prompts)
    peak = _train_peak(spec, folder, layers)
    return Preflight({"verifier": verifier.digest, **sources}, tuple(warnings), verifier, layers, peak)


def _source(dataset: DatasetSpec, pointer: str, file_roots: Sequence[Path]) -> Source:
    return Source(dataset, resolve(dataset.uri, file_roots, pointer=pointer), pointer)


def _check_lines(spec: JobSpec, train: Sequence[Source], prompts: Sequence[Source]) -> Iterator[str]:
    """Warnings about lines that will be left out. Raises DatasetFault when too many are."""
    for source in (*train, *prompts):
        tally = probe(
            source.path,
            source.spec,
            spec.data.bad_rows_limit,
            answers_needed=source in train and not spec.data.regenerate.enabled,
            pointer=source.pointer,
        )
        if tally.bad:
            yield f"{source.spec.uri}: {tally.bad} of the first {tally.lines} lines cannot be used and are left out"


def _check_usable(spec: JobSpec, verifier: Identity, train: Sequence[Source], prompts: Sequence[Source]) -> None:
    """Tokenise until one line makes a sample. Raises DataTooShort, DataAllMasked or DatasetFormat when none can.

    Files that are longer than what is looked at here get the benefit of the doubt; prepare reads them whole.
    """
    chat = Chat.of(verifier)
    limit = min(spec.data.max_seq_len, verifier.max_position_embeddings)
    regenerate = spec.data.regenerate.enabled
    for sources, answered, pointer in ((train, not regenerate, "/datasets"), (prompts, False, "/evaluation/prompts")):
        sampler = Sampler(chat, limit)
        if not any(_makes_a_sample(source, sampler, answered=answered) for source in sources):
            raise sampler.nothing_left(pointer)


def _makes_a_sample(source: Source, sampler: Sampler, *, answered: bool) -> bool:
    tally = Tally()
    for conversation in source.usable(tally, answers_needed=answered, max_lines=SAMPLE_LINES):
        try:
            _ = sampler.answered(conversation) if answered else sampler.prompt(conversation)
        except Dropped:
            continue
        return True
    return tally.lines == SAMPLE_LINES


def _train_peak(spec: JobSpec, folder: Path, layers: tuple[int, int, int]) -> int:
    """Bytes at the peak of a pass that is full and all the assistant's. Raises NoRoom, UnsupportedVerifier."""
    training, text = spec.training, read_text_config(folder)
    config = drafter_config(
        text, algorithm=training.algorithm, aux_layers=layers, ttt_steps=training.ttt_steps,
        draft_vocab_size=spec.vocab.draft_vocab_size or int(text["vocab_size"]),
    )  # fmt: skip
    whole = training.dtype == "float32" or (training.dtype == "auto" and spec.verifier.device == "cpu")
    demand = Demand(
        config, 4 if whole else 2, training.train_lm_head, ranks=training.gpus or 1,
        sharded=training.sharding == "fsdp2", cuda=spec.verifier.device != "cpu",
    )  # fmt: skip
    rows = Rows.densest(training.batch_tokens, training.ttt_steps)
    room = None if training.memory_gib is None else int(training.memory_gib * 2**30)
    return demand.peak(rows, slices=demand.slices(rows, room))


def _check_vocab(spec: JobSpec, verifier: Identity) -> None:
    wanted = spec.vocab.draft_vocab_size
    if wanted is not None and wanted > verifier.vocab_size:
        raise VocabSize(
            f"draft_vocab_size is {wanted}, the vocabulary of {verifier.name} has {verifier.vocab_size} tokens",
            remedy=f"set it to at most {verifier.vocab_size}, or to null for the whole vocabulary",
            pointer="/vocab/draft_vocab_size",
        )


def _check_init(spec: JobSpec, verifier: Identity) -> None:
    if spec.training.init == "verifier_layer" and verifier.last_layer != LLAMA_LAYER:
        odd = sorted(verifier.last_layer ^ LLAMA_LAYER)
        raise InitUnsupported(
            f"init is verifier_layer, but a layer of {verifier.name} is no Llama layer: they differ in {', '.join(odd[:4])}",
            remedy="use init: random",
            pointer="/training/init",
        )


def _check_held_out(spec: JobSpec, sources: dict[str, str]) -> None:
    train = {sources[d.uri]: d.uri for d in spec.datasets}
    for i, prompts in enumerate(spec.evaluation.prompts):
        if (same := train.get(sources[prompts.uri])) is not None:
            raise HeldOutOverlap(
                f"{prompts.uri} measures the drafter and {same} trains it, and both have the same content",
                remedy="keep some prompts apart: an acceptance length on training prompts says nothing",
                pointer=f"/evaluation/prompts/{i}/uri",
            )


def _warnings(spec: JobSpec, verifier: Identity) -> Iterator[str]:
    longest = verifier.max_position_embeddings
    if spec.data.max_seq_len > longest:
        yield f"data.max_seq_len {spec.data.max_seq_len} is more than the {longest} positions that {verifier.name} knows"
    if spec.data.regenerate.enabled and spec.data.regenerate.max_new_tokens >= spec.data.max_seq_len:
        yield (
            f"answers of up to {spec.data.regenerate.max_new_tokens} tokens do not fit data.max_seq_len "
            f"{spec.data.max_seq_len}: samples are cut there"
        )
    if spec.evaluation.num_steps > spec.training.ttt_steps:
        yield (
            f"evaluation.num_steps {spec.evaluation.num_steps} drafts deeper than training.ttt_steps "
            f"{spec.training.ttt_steps} trains"
        )
    if spec.verifier.dtype != "float32" and spec.evaluation.near_tie_logit_gap == 0:
        yield (
            f"the verifier runs in {spec.verifier.dtype}, where a batched pass rounds differently, and "
            "evaluation.near_tie_logit_gap is 0: any difference will count as a loss"
        )
