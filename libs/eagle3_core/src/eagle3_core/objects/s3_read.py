"""Reads from an S3 store: whole small objects, ranges, and large objects into a file, part by part.

An answer counts only if it is what was asked: the range that it says, as long as it says, and, for a whole small object,
hashing to the digest that was stored with it. Anything else (a cut connection, a proxy's page, a flipped bit) is asked
for again. A download holds one piece for each of its few streams in memory, however large the object is, and a broken
part is fetched again without the others.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from minio.error import InvalidResponseError, S3Error
from urllib3 import BaseHTTPResponse

from eagle3_core.digests import digest_bytes
from eagle3_core.objects.protocol import StoreUnfit
from eagle3_core.objects.s3_errors import Answered, Cut, Damaged, code_and_status

Result = TypeVar("Result")
Ask = Callable[[str, Callable[[], Result]], Result]
"""Runs a request, again where it may pass; the text says what is asked, for the error."""

Opener = Callable[[int, int | None], BaseHTTPResponse]
"""One request for an object from a byte on, for so many bytes or to the end. Raises what a store's refusal is."""

DIGEST_HEADER = "x-amz-meta-blake3"
PART_BYTES = 16 << 20
PIECE_BYTES = 1 << 20
STREAMS = 4
"""Parts under way at once. For stores over a network, where one connection is held back by its window and by the store's own
limit; a break then also costs one part, not the whole. On loopback, where neither is so, they gain nothing: 0.74 and 0.85 of
the rate of one plain stream in two runs, for 1.1 times the CPU (benchmarks/store.py)."""


def copy_in(folder: Path, name: str) -> Path:
    """Where the copy of the object `name` lies in `folder`."""
    return folder / f"{digest_bytes(name.encode())[:16]}-{name.rpartition('/')[2][-128:]}"


def read_bytes(opened: Opener, start: int, length: int | None) -> bytes:
    """One attempt at `length` bytes (one at least) from `start`, or to the end; fewer where the object is shorter."""
    whole = start == 0 and length is None
    try:
        answer = opened(start, length)
    except (S3Error, InvalidResponseError, Answered) as error:
        if code_and_status(error) in (("InvalidRange", 416), ("", 416)):
            return b""  # the range begins behind the object's end
        raise
    try:
        data = answer.read()
        size = _announced(answer.headers, start, whole=whole)
        if len(data) != size or (length is not None and size > length):
            raise Cut(f"{len(data)} bytes came, {size} were announced")
        stored = answer.headers.get(DIGEST_HEADER)
        if whole and stored and (have := digest_bytes(data)) != stored:
            raise Damaged(f"it hashes to {have[:16]}, it was stored as {stored[:16]}")
        return data
    finally:
        answer.close()
        answer.release_conn()


def download(opened: Opener, name: str, size: int, target: Path, ask: Ask[Any]) -> None:
    """Write the object (of `size` bytes) to `target`, whole or not at all."""
    temporary = target.with_name(f".part-{uuid.uuid4().hex}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)  # a full disk is told before the download, not at its end

        def part(start: int) -> None:
            stop = min(start + PART_BYTES, size)
            ask(f"GET {name} bytes {start}-{stop - 1}", lambda: _copy(opened, start, stop, descriptor))

        starts = range(0, size, PART_BYTES)
        with ThreadPoolExecutor(min(STREAMS, max(len(starts), 1)), "download") as streams:
            parts = [streams.submit(part, start) for start in starts]
            try:
                for done in parts:
                    done.result()
            except BaseException:
                for waiting in parts:
                    waiting.cancel()
                raise
        temporary.replace(target)
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def _copy(opened: Opener, start: int, stop: int, descriptor: int) -> None:
    """One attempt at the bytes from `start` to `stop` (exclusive), written to their place in the file."""
    answer = opened(start, stop - start)
    try:
        size = _announced(answer.headers, start, whole=False)
        if size != stop - start:
            raise Cut(f"{stop - start} bytes were asked for, {size} announced")
        at, piece = start, memoryview(bytearray(PIECE_BYTES))
        while count := answer.readinto(piece):
            if at + count > stop:
                raise Cut("more bytes came than were announced")
            os.pwrite(descriptor, piece[:count], at)
            at += count
        if at != stop:
            raise Cut(f"{at - start} bytes came, {stop - start} were announced")
    finally:
        answer.close()
        answer.release_conn()


def _announced(headers: Any, start: int, *, whole: bool) -> int:
    """How many bytes the answer says it has. Raises Cut, and StoreUnfit where a range was ignored."""
    ranged = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", headers.get("Content-Range", ""))
    if ranged is not None:
        if int(ranged[1]) != start:
            raise Cut(f"the range from {start} was asked for, {ranged[0]} came")
        return int(ranged[2]) - int(ranged[1]) + 1
    if not whole:
        raise StoreUnfit(
            "the store answers a request for a range with the whole object", remedy="use a store that serves ranges"
        )
    length = headers.get("Content-Length", "")
    if not length.isdigit():
        raise Cut("the answer does not say how long it is")
    return int(length)
