"""Lines of a JSONL file as conversations, one at a time, and which lines cannot be used and why.

People bring files of four shapes and a few broken lines in each. A file is read as a stream, so its size costs no
memory; a broken line is counted with its number and its reason, and only when their share passes `bad_rows_limit` is the
data set refused, by the error of its most frequent fault. `rows` knows the shapes of a line.
"""

from __future__ import annotations

import gzip
import itertools
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
SAMPLE_LINES = 1000
"""Lines that `probe` looks at."""
EXAMPLES_KEPT = 5
REASONS_KEPT = 20


@dataclass
class Tally:
    """What became of a data set's lines."""

    lines: int = 0
    """Lines that hold something."""
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
    max_lines: int | None = None,
) -> Iterator[Conversation]:
    """The usable lines of `path`, in order, at most `spec.max_samples`; what became of each line goes into `tally`.

    `answers_needed` says that a line without an assistant turn is of no use; `max_lines` ends the reading early.
    Raises DatasetMissing, and DatasetFormat for a file that is compressed beyond reason.
    """
    shape: Format | None = None if spec.format == "auto" else spec.format
    source = path.name.split(".")[0]
    for number, raw in _lines(path, pointer):
        if tally.good == spec.max_samples or tally.lines == max_lines:
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


def judge(
    path: Path, tally: Tally, bad_rows_limit: float, *, lines: int | None = None, pointer: str | None = None
) -> None:
    """Raise the fault of the most frequent kind if nothing is usable or more than the limit is not.

    `lines` is the number of lines in the whole file where `tally` saw only its beginning.
    """
    if tally.lines == 0:
        raise fault(DatasetEmpty, f"{path} holds no line", pointer)
    if tally.good and tally.bad <= bad_rows_limit * max(lines or 0, tally.lines):
        return
    kind = tally.kinds.most_common(1)[0][0]
    share = f"{tally.bad} of {tally.lines} lines of {path} cannot be used (limit {bad_rows_limit:.2%})"
    raise fault(kind, f"{share}; {'; '.join(tally.examples[kind])}", pointer)


def probe(
    path: Path, spec: DatasetSpec, bad_rows_limit: float, *, answers_needed: bool, pointer: str | None = None
) -> Tally:
    """Read the first SAMPLE_LINES lines; refuse a file in which none is usable, or which must end above the limit.

    Raises DatasetFault.
    """
    tally = Tally()
    for _ in read(path, spec, tally, answers_needed=answers_needed, pointer=pointer, max_lines=SAMPLE_LINES):
        pass
    lines = None
    if tally.bad and tally.lines == SAMPLE_LINES:
        lines = sum(1 for _, raw in _lines(path, pointer) if raw is None or raw.strip())
    judge(path, tally, bad_rows_limit, lines=lines, pointer=pointer)
    return tally


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


def _lines(path: Path, pointer: str | None) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines of a plain or gzip file; None stands for one that is too long."""
    try:
        size = _regular_size(path, pointer)
        with path.open("rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=plain)) if packed else plain
            budget = max(MIN_UNPACKED_BYTES, MAX_EXPANSION * size) if packed else None
            yield from _split(stream, budget, path, pointer)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise fault(DatasetFormat, f"{path} is a damaged gzip file: {error}", pointer) from error
    except OSError as error:
        raise fault(DatasetMissing, f"{path} cannot be read: {error}", pointer) from error


def _split(
    stream: IO[bytes], budget: int | None, path: Path, pointer: str | None
) -> Iterator[tuple[int, bytes | None]]:
    seen = 0
    for number in itertools.count(1):
        line = stream.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        whole = len(line) <= MAX_LINE_BYTES
        seen += len(line)
        while not whole and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)
            seen += len(line)
            if not line or (budget is not None and seen > budget):
                break
        if budget is not None and seen > budget:
            raise fault(DatasetFormat, f"{path} unpacks to more than {budget} bytes, which text does not", pointer)
        yield number, line if whole else None


def _regular_size(path: Path, pointer: str | None) -> int:
    try:
        status = os.stat(path)
    except OSError as error:
        raise fault(DatasetMissing, f"there is no file {path}: {error.strerror}", pointer) from error
    if not stat.S_ISREG(status.st_mode):
        raise fault(DatasetMissing, f"{path} is no regular file", pointer)
    return status.st_size
