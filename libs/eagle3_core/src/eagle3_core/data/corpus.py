"""A job's data sets as two token sets: what to train on and what to measure with.

Files are read twice, once to count what is usable and once to tokenise what was drawn, so that memory holds tokens and no
text (a job that asks a server by messages keeps those of its prompts, compressed). Sources are interleaved, so that every
slice sees the whole mix; prompts that are held out are taken away from training, and a prompt that the verifier will answer
is asked once: greedy answers to the same prompt are the same, and measured twice one would narrow the interval without
being another observation.

Shapes: T tokens of one sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eagle3_core.data.datasets import Tally, judge, mix, read
from eagle3_core.data.rows import Conversation, DatasetFormat
from eagle3_core.data.samples import UNUSABLE, Dropped, HeldOutOverlap, Sample, Sampler
from eagle3_core.data.tokensets import TokenSet
from eagle3_core.jobs.spec import Data, DatasetSpec

HELD_OUT, DUPLICATE = "in_evaluation", "duplicate"
FEW_PROMPTS = 20
"""Held-out prompts below which the interval of an acceptance length is too wide to tell drafters apart."""


@dataclass(frozen=True)
class Source:
    """One data set of the job."""

    spec: DatasetSpec
    path: Path
    pointer: str
    """JSON pointer of its URI."""

    def usable(self, tally: Tally, *, answers_needed: bool = False, beginning: bool = False) -> Iterator[Conversation]:
        """Its usable lines; see `datasets.read`."""
        return read(
            self.path, self.spec, tally, answers_needed=answers_needed, pointer=self.pointer, beginning=beginning
        )


@dataclass(frozen=True)
class _Drawn:
    """A conversation that was drawn."""

    source: int
    place: float
    """Its place in the source's share, from 0 to 1: what the mix is sorted by."""
    row: int
    """Its number among the usable lines, from 1."""
    conversation: Conversation


def no_progress(done: int, total: int) -> None:
    """Tell nobody."""


def held_out_prompts(
    sources: Sequence[Source], sampler: Sampler, *, max_prompts: int | None, bad_rows_limit: float
) -> tuple[TokenSet, frozenset[bytes]]:
    """The prompts that will measure the drafter, in order, and their keys by text and by tokens (`overlap`).

    Raises DatasetFault, DataTooShort, EncodingTooCostly.
    """
    samples: dict[bytes, Sample] = {}
    for source in sources:
        tally = Tally()
        for conversation in source.usable(tally):
            if len(samples) == max_prompts:
                break
            try:
                sample = sampler.prompt(conversation)
            except Dropped:
                continue
            if samples.setdefault(sample.input_ids.tobytes(), sample) is not sample:
                sampler.dropped[DUPLICATE] += 1
        judge(source.path, tally, bad_rows_limit, pointer=source.pointer)
    if not samples:
        raise sampler.nothing_left("/evaluation/prompts")
    return _token_set(list(samples.values())), frozenset(
        key for sample in samples.values() for key in (sample.prompts[-1], *sample.token_prompts)
    )


def few_prompts(count: int) -> Iterator[str]:
    """A warning where `count` held-out prompts are too few. Said when the job is posted, and of what is left in prepare."""
    if count < FEW_PROMPTS:
        yield (
            f"{'1 held-out prompt is' if count == 1 else f'{count} held-out prompts are'} few: the acceptance length will be "
            f"uncertain; give at least {FEW_PROMPTS} in evaluation.prompts"
        )


def training_samples(
    sources: Sequence[Source],
    data: Data,
    sampler: Sampler,
    held_out: frozenset[bytes],
    progress: Callable[[int, int], None] = no_progress,
) -> tuple[TokenSet, dict[str, int], list[bytes]]:
    """The samples to train on, how many lines were dropped by reason, and the conversations if `sampler` keeps them.

    `held_out` are the keys of the prompts that will measure the drafter (`overlap`); `progress` is told (done, total) and
    may raise to stop. Raises DatasetFault, DataTooShort, DataAllMasked, HeldOutOverlap, EncodingTooCostly.
    """
    answers_needed = not data.regenerate.enabled
    dropped: Counter[str] = Counter()
    counts: list[int] = []
    for source in sources:
        tally = Tally()
        counts.append(sum(1 for _ in source.usable(tally, answers_needed=answers_needed)))
        judge(source.path, tally, data.bad_rows_limit, pointer=source.pointer)
        dropped.update({kind.code.removeprefix("dataset."): count for kind, count in tally.kinds.items()})
    chosen = mix(counts, [source.spec.weight for source in sources], data.max_samples)
    samples = _tokenise(sources, chosen, data, sampler, progress)
    dropped.update(sampler.dropped)
    if not samples:
        raise sampler.nothing_left("/datasets")
    kept = list(_apart(samples, held_out, dropped, unique=data.regenerate.enabled))
    if not kept:
        raise HeldOutOverlap(
            f"all {len(samples)} training samples are held-out prompts too, by their text or by the tokens that the verifier's "
            "chat template makes of it",
            remedy="keep some prompts apart: an acceptance length on training prompts says nothing",
            pointer="/evaluation/prompts",
        )
    messages = [sample.messages for sample in kept] if sampler.keep_messages else []
    return _token_set(kept), dict(sorted(dropped.items())), messages


def _tokenise(
    sources: Sequence[Source],
    chosen: Sequence[NDArray[np.int64]],
    data: Data,
    sampler: Sampler,
    progress: Callable[[int, int], None],
) -> list[Sample]:
    """The drawn conversations as samples, sources interleaved."""
    regenerate, total = data.regenerate.enabled, sum(map(len, chosen))
    tallies = [Tally() for _ in sources]
    placed: list[tuple[float, int, Sample]] = []
    for done, drawn in enumerate(_drawn(sources, chosen, answers_needed=not regenerate)):
        progress(done, total)
        tally = tallies[drawn.source]
        tally.lines += 1
        try:
            sample = sampler.prompt(drawn.conversation) if regenerate else sampler.answered(drawn.conversation)
        except Dropped as drop:
            if drop.reason in UNUSABLE:
                tally.add(drawn.row, DatasetFormat, drop.detail)
            continue
        tally.good += 1
        placed.append((drawn.place, drawn.source, sample))
    progress(total, total)
    for source, tally in zip(sources, tallies, strict=True):
        if tally.bad:
            judge(source.path, tally, data.bad_rows_limit, pointer=source.pointer)
    return [sample for _, _, sample in sorted(placed, key=lambda entry: entry[:2])]


def _drawn(sources: Sequence[Source], chosen: Sequence[NDArray[np.int64]], *, answers_needed: bool) -> Iterator[_Drawn]:
    for index, (source, rows) in enumerate(zip(sources, chosen, strict=True)):
        wanted = {int(row): rank for rank, row in enumerate(rows)}
        for row, conversation in enumerate(source.usable(Tally(), answers_needed=answers_needed)):
            if row in wanted:
                yield _Drawn(index, (wanted[row] + 0.5) / len(wanted), row + 1, conversation)


def _apart(
    samples: Iterable[Sample], held_out: frozenset[bytes], dropped: Counter[str], *, unique: bool
) -> Iterator[Sample]:
    """`samples` that answer no held-out prompt; with `unique`, each token sequence once."""
    seen: set[bytes] = set()
    for sample in samples:
        whole = sample.input_ids.tobytes()
        if not held_out.isdisjoint((*sample.prompts, *sample.token_prompts)):
            dropped[HELD_OUT] += 1
        elif unique and whole in seen:
            dropped[DUPLICATE] += 1
        else:
            seen.add(whole)
            yield sample


def _token_set(samples: Sequence[Sample]) -> TokenSet:
    """`samples` as one set, ids made unique by a count behind those that come again."""
    seen: Counter[str] = Counter()
    rows: list[tuple[str, str, NDArray[np.int32], NDArray[np.uint8]]] = []
    for sample in samples:
        seen[sample.id] += 1
        name = sample.id if seen[sample.id] == 1 else f"{sample.id}#{seen[sample.id]}"
        rows.append((name, sample.task, sample.input_ids, sample.loss_mask))
    return TokenSet.build(rows)
