"""Lines of a JSONL file as conversations, one at a time, and which lines cannot be used and why.

People bring files of four shapes and a few broken lines in each. A file is read as a stream, so its size costs no
memory; a broken line is counted with its number and its reason, and only when their share passes `bad_rows_limit` is the
data set refused, by the error of its most frequent fault. `rows` knows the shapes of a line.
"""

from __future__ import annotations

import gzip
import itertools
import math
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from eagle3_core.data.rows import (
    MAX_LINE_BYTES,
    Conversation,
    DatasetEmpty,
    DatasetFault,
    DatasetFormat,
    DatasetMissing,
    Format,
    RowFault,
    detect,
    fault,
    parse,
    row_of,
)
from eagle3_core.jobs.spec import DatasetSpec

MAX_EXPANSION = 100
"""A gzip file may grow by this factor: text shrinks by 3 to 10, a bomb by 1,000."""
MIN_UNPACKED_BYTES = 1 << 30
"""What any gzip file may grow to."""
SAMPLE_LINES, SAMPLE_BYTES = 1000, 32 << 20
"""Lines of a file's beginning, and bytes of them."""
STOPPED = 0
COUNTED_BYTES = 256 << 20
"""Bytes in which lines are counted, to judge a file by its beginning."""
EXAMPLES_KEPT = 5
REASONS_KEPT = 20


@dataclass
class Tally:
    """What became of a data set's lines."""

    lines: int = 0
    """Lines that hold something."""
    whole: bool = False
    """Whether the file was read to its end."""
    good: int = 0
    reasons: Counter[str] = field(default_factory=Counter[str])
    kinds: Counter[type[DatasetFault]] = field(default_factory=Counter[type[DatasetFault]])
    examples: dict[type[DatasetFault], list[str]] = field(default_factory=dict[type[DatasetFault], list[str]])
    """The first few faults of a kind, each with its line's number."""

    @property
    def bad(self) -> int:
        """Lines that cannot be used."""
        return self.kinds.total()

    def add(self, line: int, kind: type[DatasetFault], reason: str) -> None:
        """Count a fault of line `line`."""
        self.kinds[kind] += 1
        known = reason in self.reasons or len(self.reasons) < REASONS_KEPT
        self.reasons[reason if known else "other"] += 1
        seen = self.examples.setdefault(kind, [])
        if len(seen) < EXAMPLES_KEPT:
            seen.append(f"line {line}: {reason}")


def read(
    path: Path,
    spec: DatasetSpec,
    tally: Tally,
    *,
    answers_needed: bool,
    pointer: str | None = None,
    beginning: bool = False,
) -> Iterator[Conversation]:
    """The usable lines of `path`, in order, at most `spec.max_samples`; what became of each line goes into `tally`.

    `answers_needed` says that a line without an assistant turn is of no use; `beginning` ends the reading after SAMPLE_LINES
    or SAMPLE_BYTES. Raises DatasetMissing, and DatasetFormat for a file that is compressed beyond reason.
    """
    shape: Format | None = None if spec.format == "auto" else spec.format
    source = path.name.split(".")[0]
    for number, raw in _lines(path, pointer, SAMPLE_BYTES if beginning else None):
        if tally.good == spec.max_samples:
            break
        if number == STOPPED or (beginning and tally.lines == SAMPLE_LINES):
            return
        if raw is not None and not raw.strip():
            continue
        tally.lines += 1
        try:
            row = row_of(raw)
            shape = shape or detect(row)
            conversation = parse(row, shape, name=f"{source}-{number}", task=source, answers_needed=answers_needed)
        except RowFault as row_fault:
            tally.add(number, row_fault.kind, row_fault.reason)
            continue
        tally.good += 1
        yield conversation
    tally.whole = True


def judge(
    path: Path, tally: Tally, bad_rows_limit: float, *, lines: float | None = None, pointer: str | None = None
) -> None:
    """Raise the fault of the most frequent kind if nothing is usable or more than the limit is not.

    `lines` is the number of lines in the whole file where `tally` saw only its beginning (infinity: nobody knows).
    """
    if tally.lines == 0:
        where = "" if tally.whole else f" in its first {SAMPLE_BYTES} bytes"
        raise fault(DatasetEmpty, f"{path} holds no line{where}", pointer)
    total = max(lines or 0, tally.lines)
    allowed = bad_rows_limit * total if bad_rows_limit else 0
    if tally.bad == 0 or (tally.good and tally.bad <= allowed):
        return
    kind = tally.kinds.most_common(1)[0][0]
    share = f"{tally.bad} of {tally.lines} lines of {path} cannot be used (limit {bad_rows_limit:.2%})"
    raise fault(kind, f"{share}; {'; '.join(tally.examples[kind])}", pointer)


def judge_beginning(path: Path, tally: Tally, bad_rows_limit: float, *, pointer: str | None = None) -> None:
    """`judge` a file of which only the beginning was read: refuse what has no usable line there, or must end above the limit."""
    lines = None if tally.whole or not tally.bad else _count(path, pointer)
    judge(path, tally, bad_rows_limit, lines=lines, pointer=pointer)


def _count(path: Path, pointer: str | None) -> float:
    """Lines of a file that hold something; infinity where counting them would take long."""
    lines = 0
    for number, raw in _lines(path, pointer, COUNTED_BYTES):
        if number == STOPPED:
            return math.inf
        lines += raw is None or bool(raw.strip())
    return lines


def mix(
    counts: Sequence[int], weights: Sequence[float], max_samples: int | None, seed: int = 0
) -> list[NDArray[np.int64]]:
    """Which rows of each source are used: ascending row numbers i64, drawn from `seed`.

    Without a limit that binds, all. Otherwise sources get shares in the ratio of their weights; what a small source
    cannot fill goes to the others, in the same ratio.
    """
    quotas = _quotas(counts, weights, max_samples)
    chosen: list[NDArray[np.int64]] = []
    for index, (count, quota) in enumerate(zip(counts, quotas, strict=True)):
        draw = np.random.default_rng([seed, index])
        rows = np.arange(count) if quota == count else np.sort(draw.choice(count, quota, replace=False))
        chosen.append(rows.astype(np.int64))
    return chosen


def _quotas(counts: Sequence[int], weights: Sequence[float], max_samples: int | None) -> list[int]:
    largest = max(weights)
    weights = [weight / largest for weight in weights]
    quotas = [0] * len(counts)
    left = min(sum(counts), sum(counts) if max_samples is None else max_samples)
    while left:
        open_ = [i for i, count in enumerate(counts) if quotas[i] < count]
        total = sum(weights[i] for i in open_)
        shares = {i: left * weights[i] / total for i in open_}
        # Whole parts first, then the largest remainders; ties go to the earlier source.
        given = {i: int(shares[i]) for i in open_}
        spare = left - sum(given.values())
        for i in sorted(open_, key=lambda i: (given[i] - shares[i], i))[:spare]:
            given[i] += 1
        for i in open_:
            taken = min(given[i], counts[i] - quotas[i])
            quotas[i] += taken
            left -= taken
    return quotas


def _lines(path: Path, pointer: str | None, stop: int | None) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines of a plain or gzip file; None stands for one that is too long, the number STOPPED for what lies behind
    the first `stop` bytes."""
    try:
        size = _regular_size(path, pointer)
        with path.open("rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=plain)) if packed else plain
            budget = max(MIN_UNPACKED_BYTES, MAX_EXPANSION * size) if packed else None
            yield from _split(stream, budget, stop, path, pointer)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise fault(DatasetFormat, f"{path} is a damaged gzip file: {error}", pointer) from error
    except OSError as error:
        raise fault(DatasetMissing, f"{path} cannot be read: {error}", pointer) from error


def _split(
    stream: IO[bytes], budget: int | None, stop: int | None, path: Path, pointer: str | None
) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines. One that is too long is told at once, and skipped when the next one is asked for."""
    seen = 0

    def piece(length: int) -> bytes:
        nonlocal seen
        got = stream.readline(length)
        seen += len(got)
        if budget is not None and seen > budget:
            raise fault(DatasetFormat, f"{path} unpacks to more than {budget} bytes, which text does not", pointer)
        return got

    for number in itertools.count(1):
        if stop is not None and seen >= stop:
            yield STOPPED, None
        if not (line := piece(MAX_LINE_BYTES + 1)):
            return
        whole = len(line) <= MAX_LINE_BYTES
        yield number, line if whole else None
        while not whole and line and not line.endswith(b"\n"):
            line = piece(MAX_LINE_BYTES)
            if stop is not None and seen >= stop:
                break


def _regular_size(path: Path, pointer: str | None) -> int:
    try:
        status = os.stat(path)
    except OSError as error:
        raise fault(DatasetMissing, f"there is no file {path}: {error.strerror}", pointer) from error
    if not stat.S_ISREG(status.st_mode):
        raise fault(DatasetMissing, f"{path} is no regular file", pointer)
    return status.st_size
