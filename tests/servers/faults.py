"""A proxy that breaks requests on their way to a real server, by a schedule that its seed repeats.

What an object store's clients meet in a bad week: 503 and 500, a connection reset before, in the middle of and after a
request (so that a write happened and nobody heard), half an answer, silence, a flipped bit in an object. One request is
broken at most `limit` times in a row, so whoever tries again often enough gets through: a client that fails under it
gave up too early or took damage for data.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Collection, Coroutine
from typing import Any

BROKEN = ("slow_down", "internal_error", "reset", "half_upload", "lost_answer", "half_answer", "silence", "flip")
CHUNK = 1 << 16
SLOW_S = 2.0
"""What a `slow` answer takes longer: nothing is broken, and nobody should give up."""
_ERRORS = {
    "slow_down": (503, "SlowDown"),
    "internal_error": (500, "InternalError"),
    "full": (507, "InsufficientStorage"),
}


class Schedule:
    """Which request is broken, and how: the same for the same seed and the same order of requests."""

    def __init__(
        self, seed: int, kinds: Collection[str] = BROKEN, share: float = 0.4, limit: int = 2, most: int | None = None
    ) -> None:
        """Break a `share` of requests, one at most `limit` times in a row, `most` times in all."""
        self._random, self._left = random.Random(seed), most
        self._kinds, self._share, self._limit = sorted(kinds), share, limit
        self._in_a_row: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.done: Counter[str] = Counter()
        """How often each kind was done; `passed` counts what was left alone."""
        self.on = True

    def next(self, request: str) -> str | None:
        """How `request` is broken, or None."""
        with self._lock:
            kind = self._random.choice(self._kinds) if self._random.random() < self._share else None
            if not self.on or self._left == 0 or self._in_a_row[request] >= self._limit:
                kind = None
            if kind and self._left is not None:
                self._left -= 1
            self._in_a_row[request] = self._in_a_row[request] + 1 if kind else 0
            self.done[kind or "passed"] += 1
            return kind


class Request:
    """The head of a request."""

    def __init__(self, head: bytes) -> None:
        self.method, self.target, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        names = re.findall(rb"^([^:\r\n]+):[ \t]*([^\r\n]*)\r$", head, re.M)
        self.headers = {name.lower().decode(): value.decode() for name, value in names}
        self.head = re.sub(rb"(?i)^connection:[^\n]*\n", b"", head, flags=re.M)[:-2] + b"Connection: close\r\n\r\n"
        self.length = int(self.headers.get("content-length", "0"))

    @property
    def identity(self) -> str:
        """What tells it apart from others, and not from its repetitions."""
        return f"{self.method} {self.target} {self.headers.get('range', '')}"

    @property
    def reads_an_object(self) -> bool:
        """Whether its answer is an object's bytes (and no list or other document)."""
        path, _, query = self.target.partition("?")
        return self.method == "GET" and path.count("/") > 2 and "list-type" not in query and "uploads" not in query


class FaultProxy:
    """Listens on a free loopback port and speaks to `127.0.0.1:port` for its clients. Use it as a context."""

    def __init__(self, port: int, schedule: Schedule) -> None:
        self._port, self.schedule = port, schedule
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # let the transports that were closed say goodbye

    async def _serve(self, client: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            request = Request(await client.readuntil(b"\r\n\r\n"))
            await self._answer(request, self.schedule.next(request.identity), client, out)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            _reset(out)
        finally:
            out.close()
            self._tasks.discard(task)

    async def _answer(
        self, request: Request, kind: str | None, client: asyncio.StreamReader, out: asyncio.StreamWriter
    ) -> None:
        if kind in _ERRORS:
            await _drain(client, request.length)
            return out.write(_error(*_ERRORS[kind], head_only=request.method == "HEAD"))
        if kind == "silence":
            await client.read()  # until the client gives up
            return None
        if kind == "reset":
            return _reset(out)
        if kind == "slow":
            await asyncio.sleep(SLOW_S)  # the fault itself
        server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            to_server.write(request.head)
            half = kind == "half_upload"
            await _copy(client, to_server, request.length // 2 if half else request.length)
            if half:
                _reset(to_server)
                return _reset(out)
            head = await server.readuntil(b"\r\n\r\n")
            if kind == "lost_answer":
                return _reset(out)
            await self._pass_on(request, kind, head, server, out)
        finally:
            to_server.close()
        return None

    async def _pass_on(
        self, request: Request, kind: str | None, head: bytes, server: asyncio.StreamReader, out: asyncio.StreamWriter
    ) -> None:
        head = re.sub(rb"(?i)^connection:[^\n]*\n", b"", head, flags=re.M)[:-2] + b"Connection: close\r\n\r\n"
        length = re.search(rb"(?im)^content-length:\s*(\d+)", head)
        size = int(length[1]) if length and request.method != "HEAD" else 0
        out.write(head)
        if kind == "half_answer":
            await _copy(server, out, size // 2)
            return _reset(out)
        if kind == "flip" and size and request.reads_an_object and b" 20" in head[:13]:
            piece = bytearray(await server.readexactly(min(size, CHUNK)))
            piece[len(piece) // 2] ^= 0x10
            out.write(piece)
        while chunk := await server.read(CHUNK):
            out.write(chunk)
            await out.drain()
        return None


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, length: int) -> None:
    while length:
        chunk = await source.read(min(length, CHUNK))
        if not chunk:
            raise ConnectionResetError("the other side went away")
        target.write(chunk)
        await target.drain()
        length -= len(chunk)


async def _drain(source: asyncio.StreamReader, length: int) -> None:
    while length and (chunk := await source.read(min(length, CHUNK))):
        length -= len(chunk)


def _reset(stream: asyncio.StreamWriter) -> None:
    """Close with RST, as a machine that lost its memory would."""
    raw: socket.socket | None = stream.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.transport.abort()


def _error(status: int, code: str, *, head_only: bool) -> bytes:
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{code}</Message></Error>'.encode()
    )
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (b"" if head_only else body)
