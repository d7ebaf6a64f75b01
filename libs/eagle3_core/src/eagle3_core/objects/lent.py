"""A store to which this process has no key: each of its requests is signed elsewhere, if it may make it.

`ask` gets a request signed (over the worker's socket, by the API), and this process then sends it to the store itself, so
hidden states do not pass through worker or API. The API decides what may be touched, by the attempt that this process runs:
the objects of its inputs, to read, and its own. Otherwise it behaves as every store here does: ranges, bounded memory, retries
with jitter, answers that are checked against what was asked, the digest of a small object in its metadata.

A signed URL for reading is used for half of its lifetime, or until the store refuses it; then a new one is asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Protocol, TypeVar

from urllib3 import BaseHTTPResponse

from eagle3_core.digests import digest_bytes
from eagle3_core.jobs.wire import ObjectAnswer, ObjectAsk
from eagle3_core.objects.lent_http import Wire, content
from eagle3_core.objects.lent_uploads import PART_BYTES, Part, upload
from eagle3_core.objects.protocol import Abilities, Stat, StoreUnfit, checked_key
from eagle3_core.objects.retry import Retries
from eagle3_core.objects.s3_errors import Answered, verdict
from eagle3_core.objects.s3_read import copy_in, download, read_bytes

Result = TypeVar("Result")
SMALL_BYTES = 1 << 20
"""Objects up to this size go up at once, with their digest; larger ones in parts."""


class Asks(Protocol):
    """Whoever has requests signed."""

    def ask(self, ask: ObjectAsk) -> ObjectAnswer:
        """The answer to `ask`. Raises what the API raises."""
        ...


class LentStore:
    """Objects that somebody else has the key to. Safe for many threads and processes."""

    def __init__(
        self, desk: Asks, url: str = "", *, retries: Retries | None = None, part_bytes: int = PART_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`url` is what `store_at` opens the same store by, in another process of this machine."""
        self.url = url
        self._desk = desk
        self._wire = Wire()
        self._retries = retries or Retries()
        self._part_bytes = part_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._urls: dict[str, tuple[str, float]] = {}

    def __repr__(self) -> str:
        return "LentStore()"

    def ask(self, what: str, work: Callable[[], Result]) -> Result:
        """What `work` returns, tried again where that may help. Raises the store's errors; `what` names the request."""
        return self._retries(work, lambda failure: verdict(failure, what))

    # -- reading

    def _url(self, key: str) -> tuple[str, bool]:
        """Where to read `key`, and whether that was asked for just now."""
        with self._lock:
            url, until = self._urls.get(key, ("", 0.0))
        if self._clock() < until:
            return url, False
        answer = self._desk.ask(ObjectAsk(do="get", key=checked_key(key)))
        if answer.url is None:
            raise StoreUnfit("the API signs no request to read", remedy="run API and worker from one version")
        with self._lock:
            self._urls[key] = answer.url, self._clock() + answer.lasts_s / 2
        return answer.url, True

    def _open(self, key: str, start: int, length: int | None) -> BaseHTTPResponse:
        """One attempt at a range. A URL that was kept and is refused is asked for anew, once. Raises Answered."""
        ranged = (
            f"bytes={start}-{'' if length is None else start + length - 1}" if start or length is not None else None
        )
        url, fresh = self._url(key)
        try:
            return self._wire.open(url, ranged)
        except Answered as refusal:
            if fresh or refusal.status not in (400, 401, 403):
                raise
        with self._lock:
            self._urls.pop(key, None)
        return self._wire.open(self._url(key)[0], ranged)

    def get_bytes(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Read `length` bytes from `start`, or to the end."""
        if length == 0:
            self.stat(key)
            return b""
        return self.ask(f"GET {key}", lambda: read_bytes(lambda at, of: self._open(key, at, of), start, length))

    def fetch(self, key: str, folder: Path) -> Path:
        """A copy of the object in `folder`; one that lies there already is taken as it is."""
        target = copy_in(folder, key)
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            download(lambda at, of: self._open(key, at, of), key, self.stat(key).size, target, self.ask)
        return target

    def stat(self, key: str) -> Stat:
        """Size and time of `key`, from the answer to a request for its first byte."""
        return self.ask(f"HEAD {key}", lambda: self._stat(key))

    def _stat(self, key: str) -> Stat:
        try:
            answer = self._open(key, 0, 1)
        except Answered as refusal:
            if refusal.status != 416:
                raise
            return Stat(key, 0, 0.0)  # there is no first byte
        headers = answer.headers
        content(answer)
        size = headers.get("Content-Range", "").rpartition("/")[2] or headers.get("Content-Length", "0")
        changed = headers.get("Last-Modified")
        return Stat(key, int(size), parsedate_to_datetime(changed).timestamp() if changed else 0.0)

    def list(self, prefix: str) -> Iterator[Stat]:
        """Objects whose key starts with `prefix`, in key order."""
        after = ""
        while True:
            page = self._desk.ask(ObjectAsk(do="list", key=prefix, after=after))
            yield from (Stat(found.key, found.size, found.modified) for found in page.found)
            if not page.more or not page.found:
                return
            after = page.found[-1].key

    # -- writing

    def put_bytes(self, key: str, data: bytes | memoryview) -> None:
        """Write `data` under `key`."""
        if len(data) > SMALL_BYTES:
            return self._put_parts(key, [Part(data, at, n) for at, n in self._cuts(len(data))], len(data))
        ask = ObjectAsk(do="put", key=checked_key(key), blake3=digest_bytes(data))
        self.ask(f"PUT {key}", lambda: self._wire.send("PUT", self._desk.ask(ask), Part(data, 0, len(data))))

    def put_file(self, key: str, path: Path) -> None:
        """Copy the file `path` under `key`, a few pieces of it in memory."""
        size = path.stat().st_size
        if size <= SMALL_BYTES:
            return self.put_bytes(key, path.read_bytes())
        self._put_parts(key, [Part(path, at, n) for at, n in self._cuts(size)], size)

    def _put_parts(self, key: str, parts: list[Part], size: int) -> None:
        upload(self._desk, self._wire, checked_key(key), parts, self.ask, lambda: self._stat(key).size == size)

    def _cuts(self, size: int) -> list[tuple[int, int]]:
        part = max(self._part_bytes, -(-size // 9_000))  # S3 takes 10,000 parts
        return [(at, min(part, size - at)) for at in range(0, size, part)]

    # -- the rest

    def delete(self, key: str) -> None:
        """Remove `key` if it is there."""
        self._desk.ask(ObjectAsk(do="delete", key=checked_key(key)))
        with self._lock:
            self._urls.pop(key, None)

    def free_bytes(self) -> int | None:
        """None: S3 does not say."""
        return None

    def download_url(self, key: str, expires_s: int, filename: str) -> str | None:
        """None: what was lent is not lent on."""
        return None

    def abort_stale_uploads(self, older_than_s: float) -> int:
        """0: whoever has the key sees to that."""
        return 0

    def probe(self) -> Abilities:
        """Refused: what the store can do is tried by whoever has the key to it. Raises StoreUnfit."""
        raise StoreUnfit("a store that is lent cannot be tried out", remedy="the API tries it when it starts")
