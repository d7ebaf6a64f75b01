"""What can be known about a job before any compute: that its inputs exist, fit together, and what they hash to.

It runs when a job is posted and in seconds: no torch, no weights, the beginning of each data set. What it refuses would
otherwise fail after hours; what is only unwise becomes a warning. Its digests are what stage keys are made of, and prepare
compares them again, so a file that is changed in between is noticed.

What it reads was brought by strangers, template and tokenizer included, so the API asks a confined process (`inspection`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.confined import Say
from eagle3_core.data.corpus import Source, few_prompts
from eagle3_core.data.encoding import ChatEncoder
from eagle3_core.data.rows import DatasetMissing, fault
from eagle3_core.data.samples import HeldOutOverlap, Sampler
from eagle3_core.data.sources import fingerprint, resolve, resolve_folder
from eagle3_core.data.split import held_out
from eagle3_core.data.templates import Chat, ChatTemplate, load_tokenizer
from eagle3_core.drafter.config import drafter_config, read_text_config
from eagle3_core.engine.config import SPARE_TOKENS
from eagle3_core.errors import AerieError
from eagle3_core.jobs.looks import TRY_CPU_S, Look, Renderings, Trial, look_at
from eagle3_core.jobs.mistakes import Mistakes
from eagle3_core.jobs.spec import DatasetSpec, JobSpec
from eagle3_core.train.memory import Demand, Rows, require_whole_samples
from eagle3_core.verifier import identity
from eagle3_core.verifier.agreement import LLAMA_LAYER
from eagle3_core.verifier.folder import POINTER
from eagle3_core.verifier.identity import Identity
from eagle3_core.verifier.layers import resolve_layers, sglang_engine, to_engine

LOAD_CPU_S = 12.0
"""CPU time of loading a tokenizer (a second for the largest in use)."""

WIDE_HIDDEN, WIDE_LR = 7168, 5e-5
"""Hidden size from which on a lower learning rate is advised, and that rate (SpecForge issue 577)."""


class VocabSize(AerieError):
    """The draft vocabulary is larger than the verifier's, or too small for the tokens that every answer needs."""

    code, status = "vocab.size", 422


class EngineTooShort(AerieError):
    """The engine takes no prompts as long as the job's samples."""

    code, status = "engine.length", 422


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


def nothing(_what: str, _pointer: str | None, /, cpu_s: float | None = None) -> None:
    """Tell nobody."""


def preflight(spec: JobSpec, file_roots: Sequence[Path], say: Say = nothing) -> Preflight:
    """Check `spec` against its verifier and its data; `say` hears what is looked at.

    Raises an AerieError with the pointer of the offending field: `verifier.*`, `drafter.verifier`, `vocab.size`,
    `training.init`, `source.*`, `dataset.*`, `data.*`, `evaluation.overlap`, `training.batch_tokens`, `training.memory`.
    Where more than one is wrong, its `faults` list them all.
    """
    mistakes, seen = Mistakes(), None
    with mistakes.noted():
        seen = _see_verifier(spec, file_roots, mistakes, say)
    train = _sources(spec.datasets, "/datasets", file_roots, mistakes)
    prompts = _sources(spec.evaluation.prompts, "/evaluation/prompts", file_roots, mistakes)
    trains = Look(not spec.data.regenerate.enabled, seen and Trial(seen.sampler(), seen.renderings))
    measures = Look(False, seen and Trial(seen.sampler(), seen.renderings))
    for sources, look, pointer in ((train, trains, "/datasets"), (prompts, measures, "/evaluation/prompts")):
        with mistakes.noted():
            look_at(sources, look, spec.data.bad_rows_limit, mistakes, say)
            look.check(pointer)
    mistakes.check()
    assert seen is not None, "what kept the verifier from being seen is a mistake"
    seen.renderings.check()
    digests = _fingerprints([*train, *prompts], say)
    _check_same_files(spec, digests)
    warnings = [*_warnings(spec, seen.verifier), *trains.warnings, *measures.warnings, *_shared(trains, measures)]
    warnings += [*_repeated(trains), *_little_left(spec.data.val_ratio, trains)]
    if measures.whole:
        different = len(set(measures.keys))
        warnings += few_prompts(min(different, spec.evaluation.max_prompts or different))
    return Preflight(
        {"verifier": seen.verifier.digest, **digests},
        tuple(warnings),
        seen.verifier,
        seen.layers,
        seen.train_peak_bytes,
    )


@dataclass(frozen=True)
class _Seen:
    """The verifier, and what needs nothing else of the job's sources."""

    verifier: Identity
    layers: tuple[int, int, int]
    train_peak_bytes: int
    renderings: Renderings
    limit: int
    """Tokens of a sample."""

    def sampler(self) -> Sampler:
        """A new one, with counts of its own."""
        return Sampler(ChatEncoder(self.renderings.chat), self.limit)


def _see_verifier(spec: JobSpec, file_roots: Sequence[Path], mistakes: Mistakes, say: Say) -> _Seen:
    """The verifier with its template and tokenizer loaded; fields of the job that do not suit it are among the `mistakes`."""
    say("the verifier", POINTER)
    folder = resolve_folder(spec.verifier.model, file_roots, pointer=POINTER)
    verifier = identity.inspect(folder, revision=spec.verifier.revision)
    layers, peak = resolve_layers(spec.extraction.aux_layers, verifier.num_layers), 0
    with mistakes.noted():
        _check_vocab(spec, verifier)
    with mistakes.noted():
        _check_engine(spec, verifier, layers)
    with mistakes.noted():
        _check_init(spec, verifier)
    with mistakes.noted():
        _check_drafter(spec, verifier, layers)
        peak = _train_peak(spec, folder, layers)
    say("the verifier's chat template", POINTER, cpu_s=TRY_CPU_S)  # compiling one computes its constants
    template = ChatTemplate(verifier.chat_template, verifier.special_tokens, spec.data.template_arguments)
    say("the verifier's tokenizer", POINTER, cpu_s=LOAD_CPU_S)
    chat = Chat(template, load_tokenizer(verifier.folder), verifier.eos_token_ids)
    return _Seen(verifier, layers, peak, Renderings(chat), verifier.longest(spec.data.max_seq_len))


def _sources(
    datasets: Sequence[DatasetSpec], pointer: str, file_roots: Sequence[Path], mistakes: Mistakes
) -> list[Source]:
    """The data sets whose URIs can be followed; the others are among the `mistakes`."""
    found: list[Source] = []
    for i, dataset in enumerate(datasets):
        place = f"{pointer}/{i}/uri"
        with mistakes.noted():
            found.append(Source(dataset, resolve(dataset.uri, file_roots, pointer=place), place))
    return found


def _shared(train: Look, prompts: Look) -> Iterator[str]:
    """A warning about prompts that both train and measure. Raises HeldOutOverlap where nothing else trains."""
    measured = {key for keys in prompts.keys for key in keys}
    shared = sum(not measured.isdisjoint(keys) for keys in train.keys)
    if shared and shared == len(train.keys) and train.whole:
        raise HeldOutOverlap(
            f"all {shared} training prompts are held-out prompts too, up to case and spacing",
            remedy="keep some prompts apart: an acceptance length on training prompts says nothing",
            pointer="/evaluation/prompts",
        )
    if shared:
        yield (
            f"{shared} of the {'' if train.whole else 'first '}{len(train.keys)} training conversations ask held-out "
            "prompts (the same up to case and spacing); they are left out of the training"
        )


def _repeated(train: Look) -> Iterator[str]:
    """A warning where the verifier would answer no more than half of the prompts, since each is asked once."""
    total, different = len(train.keys), len(set(train.keys))
    if not train.answered and 2 * different <= total:
        yield (
            f"the {'' if train.whole else 'first '}{total} training prompts are {different} different "
            f"one{'s' * (different > 1)} (up to case and spacing), and each is answered and trained on once"
        )


def _little_left(ratio: float, train: Look) -> Iterator[str]:
    """A warning where `data.val_ratio` leaves fewer conversations to train on than it holds out. Raises HeldOutOverlap where
    it leaves none."""
    total = len(train.keys)
    validated = sum(held_out(i, ratio) for i in range(total))
    if total and validated == total and train.whole:
        raise HeldOutOverlap(
            f"data.val_ratio {ratio} holds out all {total} training conversations and leaves none to train on",
            remedy="make data.val_ratio smaller, 0.05 is usual",
            pointer="/data/val_ratio",
        )
    if 2 * validated > total:
        yield (
            f"data.val_ratio {ratio} holds out {validated} of the {'' if train.whole else 'first '}{total} training "
            f"conversations and leaves {total - validated} to train on: make it smaller, 0.05 is usual"
        )


def _fingerprints(sources: Sequence[Source], say: Say) -> dict[str, str]:
    """Digests by URI; a file that is named twice is read once. Raises DatasetMissing."""
    by_path: dict[Path, str] = {}
    for source in sources:
        if source.path not in by_path:
            say(f"the digest of {source.spec.uri}", source.pointer)
            try:
                by_path[source.path] = fingerprint(source.path)
            except OSError as error:
                raise fault(DatasetMissing, f"{source.path} cannot be read: {error.strerror}", source.pointer) from None
    return {source.spec.uri: by_path[source.path] for source in sources}


def _train_peak(spec: JobSpec, folder: Path, layers: tuple[int, int, int]) -> int:
    """Bytes at the peak of a pass that is full and all the assistant's. Raises BatchTooSmall, NoRoom, Undraftable."""
    training, text = spec.training, read_text_config(folder)
    cut = min(training.max_seq_len or spec.data.max_seq_len, int(text["max_position_embeddings"]))
    require_whole_samples(training.batch_tokens, cut)
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
    if wanted is not None and wanted < (needed := len(verifier.always_drafted())):
        raise VocabSize(
            f"draft_vocab_size is {wanted}, the end-of-turn and template tokens of {verifier.name} alone are {needed}",
            remedy=f"set it to at least {needed}, better to thousands",
            pointer="/vocab/draft_vocab_size",
        )


def _check_engine(spec: JobSpec, verifier: Identity, layers: tuple[int, int, int]) -> None:
    """Raise EngineTooShort or LayerChoice where SGLang could not compute the job's samples, or not read its layers."""
    if spec.verifier.backend != "sglang":
        return
    to_engine(layers, sglang_engine(verifier.model_type))
    asked = verifier.longest(spec.data.max_seq_len)
    held = spec.verifier.engine.kv_cache_tokens
    for room, what in (
        (verifier.max_position_embeddings, f"a verifier of {verifier.max_position_embeddings} positions"),
        (held if held is not None else asked + SPARE_TOKENS, f"a KV cache of {held} tokens"),
    ):
        if asked > (most := room - SPARE_TOKENS):
            raise EngineTooShort(
                f"samples may have {asked} tokens, and SGLang takes prompts of at most {most} with {what}",
                remedy=f"set data.max_seq_len to at most {most}, or use backend transformers",
                pointer="/data/max_seq_len",
            )


def _check_drafter(spec: JobSpec, verifier: Identity, layers: tuple[int, int, int]) -> None:
    """Raise Undraftable or VerifierConfig where no drafter could be built for this verifier."""
    _ = drafter_config(
        read_text_config(verifier.folder), algorithm=spec.training.algorithm, aux_layers=layers,
        draft_vocab_size=spec.vocab.draft_vocab_size or verifier.vocab_size, ttt_steps=spec.training.ttt_steps,
    )  # fmt: skip


def _check_init(spec: JobSpec, verifier: Identity) -> None:
    if spec.training.init == "verifier_layer" and verifier.last_layer != LLAMA_LAYER:
        odd = sorted(verifier.last_layer ^ LLAMA_LAYER)
        raise InitUnsupported(
            f"init is verifier_layer, but a layer of {verifier.name} is no Llama layer: they differ in {', '.join(odd[:4])}",
            remedy="use init: random",
            pointer="/training/init",
        )


def _check_same_files(spec: JobSpec, sources: dict[str, str]) -> None:
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
    if verifier.hidden_size >= WIDE_HIDDEN and spec.training.lr > WIDE_LR:
        yield (
            f"training.lr {spec.training.lr:g} is high for a verifier of hidden size {verifier.hidden_size}: from "
            f"{WIDE_HIDDEN} on gradient norms had outliers at 1e-4, so take {WIDE_LR:g}"
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
