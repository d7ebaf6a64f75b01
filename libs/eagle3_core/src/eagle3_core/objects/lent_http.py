"""Requests that were signed elsewhere, sent: one attempt each, judged by status, bodies in pieces.

Redirects are not followed (a signature is for one host) and nothing is retried here. Over a network without TLS each body
carries its MD5, because nothing else would notice a changed byte before a reader does.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import urllib3
from urllib3 import BaseHTTPResponse

from eagle3_core.addresses import is_loopback
from eagle3_core.jobs.wire import ObjectAnswer
from eagle3_core.objects.protocol import StoreUnfit
from eagle3_core.objects.s3_clients import Patience, connections, proxy_of
from eagle3_core.objects.s3_errors import Answered, Cut

PIECE_BYTES = 1 << 20
MOST_ERROR_BYTES = 64 << 10


@dataclass(frozen=True)
class Part:
    """`size` bytes of `source` from `start` on."""

    source: Path | bytes | memoryview
    start: int
    size: int

    @contextmanager
    def body(self) -> Generator[IO[bytes]]:
        """These bytes as a file."""
        if isinstance(self.source, Path):
            with self.source.open("rb") as file:
                file.seek(self.start)
                yield io.BufferedReader(_Stretch(file, self.size), PIECE_BYTES)
        else:
            yield io.BytesIO(memoryview(self.source)[self.start : self.start + self.size])

    def md5(self) -> str:
        """Their digest, as a request's header says it."""
        digest = hashlib.md5(usedforsecurity=False)
        with self.body() as body:
            while piece := body.read(PIECE_BYTES):
                digest.update(piece)
        return base64.b64encode(digest.digest()).decode()


class _Stretch(io.RawIOBase):
    """The next `size` bytes of a file."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left = file, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)


class Wire:
    """Connections to the store that URLs lead to."""

    def __init__(self, patience: Patience | None = None) -> None:
        self._patience = patience or Patience()
        self._pools: dict[str, urllib3.PoolManager] = {}

    def open(self, url: str, ranged: str | None) -> BaseHTTPResponse:
        """The answer to a GET, its body unread. Raises Answered."""
        headers = {"Accept-Encoding": "identity"} | ({"Range": ranged} if ranged is not None else {})
        answer = self._pool(url).request("GET", url, headers=headers, preload_content=False, redirect=False)
        if answer.status not in (200, 206):
            raise Answered(answer.status, content(answer, MOST_ERROR_BYTES))
        return answer

    def send(self, method: str, signed: ObjectAnswer, part: Part | None = None) -> BaseHTTPResponse:
        """The answer to a request with the body `part`, read whole. Raises Answered."""
        if signed.url is None:
            raise StoreUnfit("the API signs no such request", remedy="run API and worker from one version")
        parts = urlsplit(signed.url)
        headers = signed.headers | {"Content-Length": str(part.size if part else 0)}
        if part is not None and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            headers["Content-MD5"] = part.md5()
        with (part or Part(b"", 0, 0)).body() as body:
            answer = self._pool(signed.url).request(
                method, signed.url, headers=headers, body=body if part else None, redirect=False,
                timeout=urllib3.Timeout(connect=self._patience.connect_s, read=self._patience.part_s),
            )  # fmt: skip
        if answer.status not in (200, 201, 204):
            raise Answered(answer.status, answer.data)
        return answer

    def _pool(self, url: str) -> urllib3.PoolManager:
        parts = urlsplit(url)
        if parts.netloc not in self._pools:
            host = parts.hostname or ""
            proxy = proxy_of(host, tls=parts.scheme == "https", loopback=is_loopback(host))
            self._pools[parts.netloc] = connections(self._patience, proxy, blocksize=PIECE_BYTES)
        return self._pools[parts.netloc]


def content(answer: BaseHTTPResponse, most: int = PIECE_BYTES) -> bytes:
    """The body of a short answer; its connection is free afterwards. Raises Cut where it is longer than `most`."""
    try:
        data = answer.read(most + 1)
        if len(data) > most:
            answer.close()
            raise Cut(f"more than {most} bytes came")
        return data
    finally:
        answer.release_conn()
