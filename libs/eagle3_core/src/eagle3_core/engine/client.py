"""Speaks to a server that runs the verifier: one request, or many in flight whose answers come as they are ready.

A request that the server turns away, or that fails for a reason that can pass, is sent again a few times, later by a
random share each time, so that those turned away together do not come back together; a server that says when to come back
(`Retry-After`) is left alone until then. What else goes wrong ends the whole, with the server's own words. No redirect is
followed: the address is one that the operator allowed, and where it points to is not. A key goes into one header of each
request and into no error (`engine.heard`). However slowly an answer comes, byte by byte if need be, its time is bounded.
"""

from __future__ import annotations

import heapq
import http.client
import io
import json
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from eagle3_core.addresses import require_no_metadata_service
from eagle3_core.engine.concurrency import Concurrency
from eagle3_core.engine.heard import Ear, is_count
from eagle3_core.engine.refusals import ServerBusy, ServerFailed, answered_error
from eagle3_core.errors import AerieError

ANSWER_S = 3600.0
"""Longest time that an answer may take: one of 32k tokens at 10 tokens a second, the slowest that is still of use."""
STATUS_S = 30.0
"""Longest time that a server may take to take a connection, or to say how it is."""
MOST_ANSWER_BYTES = 256 << 20
TRIES = 5
"""How often a request is sent. One that is turned away while others are answered waits for its turn, and does not count."""
MOST_PAUSE_S = 600.0
"""A server that wants to be left alone for longer is left to a later attempt of the unit."""
PAUSE_S = 0.5
"""Before the second try; doubled before each further one."""
LOOK_S = 0.5
"""How often a wait for answers looks whether to go on."""


def pause_s(error: AerieError, tries: int) -> float:
    """How long to wait before a request is sent again that failed by `error` for the `tries`-th time in a row."""
    asked = float(error.context.get("retry_after_s") or 0.0)
    return asked + PAUSE_S * 2 ** (tries - 1) * random.uniform(0.5, 1.5)  # noqa: S311 - spreads load, keeps no secret


@dataclass
class Connections:
    """Connections in use, so that whoever stops waiting can break them off: the server then drops their requests."""

    _open: set[http.client.HTTPConnection] = field(default_factory=set[http.client.HTTPConnection])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def add(self, connection: http.client.HTTPConnection) -> None:
        """Keep `connection`; one that comes after the end is closed at once."""
        with self._lock:
            self._open.add(connection)
            if self._closed:
                connection.close()

    def drop(self, connection: http.client.HTTPConnection) -> None:
        """Close one that is no longer needed."""
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def close(self) -> None:
        """Break all off."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                if (sock := connection.sock) is not None:
                    with suppress(
                        OSError
                    ):  # the plain socket's: TLS would take its state from under the thread that reads
                        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Until(io.RawIOBase):
    """What comes over a connection until a moment, however often a little of it comes."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, until: float) -> None:
        self._raw, self._sock, self._until = raw, sock, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        if (left := self._until - time.monotonic()) <= 0:
            raise TimeoutError("the whole answer took too long")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """An answer that is whole at a moment, or none."""

    def __init__(self, until: float, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_Until(self.fp.detach(), sock, until))


class Client:
    """A server at an address."""

    def __init__(
        self, url: str, answer_s: float = ANSWER_S, *, key: str = "", failed: type[ServerFailed] = ServerFailed
    ) -> None:
        """`url` like http://host:port; a path in it is put before every path that is asked.

        `key` opens the server (`Authorization: Bearer`); `failed` is what a server that gives no answer raises.
        """
        parts = urlsplit(url)
        self.url, self._prefix, self._answer_s = url.rstrip("/"), parts.path.rstrip("/"), answer_s
        self._host, self._port = parts.hostname or "", parts.port
        self._secure, self._key, self._failed = parts.scheme == "https", key, failed
        self._ear = Ear(key)

    def _connection(self, answer_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=min(STATUS_S, answer_s))
        connection.response_class = partial(_Answer, time.monotonic() + answer_s)  # pyright: ignore[reportAttributeAccessIssue]
        return connection

    def status(self, path: str) -> int | None:
        """The status with which a GET is answered; None where nobody answers within a few seconds."""
        connection = self._connection(STATUS_S)
        try:
            connection.request("GET", self._prefix + path)
            with connection.getresponse() as answer:  # an answer that is not closed keeps its socket
                return answer.status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object that answers a GET. Raises ServerFailed, ServerBusy."""
        return self.send(path, None, Connections())

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that answers a JSON request. Raises ServerFailed, ServerBusy, and what the capture plug-in answers."""
        return self.send(path, body, Connections())

    def send(self, path: str, body: Mapping[str, Any] | None, open_now: Connections) -> dict[str, Any]:
        """As `post`, without a body as `get`, over a connection that `open_now` knows."""
        answer_s = self._answer_s if body is not None else min(STATUS_S, self._answer_s)
        connection = self._connection(answer_s)
        open_now.add(connection)
        try:
            status, headers, said = self._exchange(connection, path, body, answer_s)
            if status == 200:
                return self._ear.document(said)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._failed(
                f"{self.url}{path} got no answer: {type(error).__name__}: {self._ear.text(str(error))}",
                remedy="see whether the server still runs, and its log",
            ) from None
        finally:
            open_now.drop(connection)
        raise answered_error(self.url, status, headers, said, self._ear)

    def _exchange(
        self, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any] | None, answer_s: float
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Status, headers and body of an answer, as they came."""
        connection.connect()
        require_no_metadata_service(self.url, connection.sock)
        connection.sock.settimeout(answer_s)
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        connection.request("GET" if body is None else "POST", self._prefix + path, data, headers)
        with connection.getresponse() as answer:
            said = answer.read(MOST_ANSWER_BYTES + 1)
        if len(said) > MOST_ANSWER_BYTES:
            raise ValueError(f"more than {MOST_ANSWER_BYTES} bytes")
        return answer.status, answer.headers, said

    def patiently(self, path: str, body: Mapping[str, Any] | None, check: Callable[[], None]) -> dict[str, Any]:
        """The answer to one request, a GET without `body`, tried again and waited for as `each` does."""
        ((_, answer),) = self.each([body], most=1, path=path, check=check)
        return answer

    def each(
        self,
        bodies: Sequence[Mapping[str, Any] | None],
        *,
        most: int,
        steady: bool = False,
        path: str = "/generate",
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The answers to `bodies`, each with its place among them, as they come; at most `most` in flight. None is a GET.

        How many are is found by trying, unless `steady` asks for `most` from the start: to measure what that many cost.
        `check` is called between answers and at least twice a second; what it raises ends the whole, as does leaving
        the iterator: the server then drops what is in flight. Raises as `post` does, after some tries.
        """
        flight = _Flight(self, path, bodies, Concurrency(most, steady=steady))
        try:
            while not flight.done:
                check()
                yield from flight.step()
        finally:
            flight.abandon()


class _Flight:
    """Requests in flight. Only its own thread touches it; the threads that ask put what they hear into a queue."""

    def __init__(
        self, client: Client, path: str, bodies: Sequence[Mapping[str, Any] | None], pace: Concurrency
    ) -> None:
        self._client, self._path, self._bodies = client, path, bodies
        self._pace = pace
        self._fresh = deque(range(len(bodies)))
        self._due: list[tuple[float, int]] = []
        """A heap of those to be sent again, by when."""
        self._tries = [0] * len(bodies)
        self._turned_away_at: dict[int, int] = {}
        """How many answers had come when one was last turned away. It waits for another: the server is at its limit."""
        self._answered, self._quiet_until = 0, 0.0
        self._heard: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._connections = Connections()
        self._flying = 0

    @property
    def done(self) -> bool:
        """Whether every answer has come."""
        return not self._fresh and not self._due and not self._flying

    def step(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Send what may be sent, then wait a moment for an answer."""
        now = time.monotonic()
        while self._flying < self._pace.limit and (place := self._next(now)) is not None:
            self._flying += 1
            threading.Thread(target=self._ask, args=(place,), name=f"ask-{place}", daemon=True).start()
        try:
            place, heard = self._heard.get(timeout=LOOK_S if self._flying else PAUSE_S / 4)
        except Empty:
            return
        self._flying -= 1
        if isinstance(heard, AerieError):
            self._again(place, heard)
        else:
            self._answered += 1
            self._pace.answered(_tokens_of(heard))
            yield place, heard

    def _next(self, now: float) -> int | None:
        """The request to send now: one whose time has come again, else a new one; None if there is none."""
        if now < self._quiet_until:
            return None
        if self._due and self._due[0][0] <= now:
            waits = self._turned_away_at.get(self._due[0][1]) == self._answered
            if not waits or not (self._fresh or self._flying):
                return heapq.heappop(self._due)[1]
        return self._fresh.popleft() if self._fresh else None

    def _ask(self, place: int) -> None:
        try:
            self._heard.put((place, self._client.send(self._path, self._bodies[place], self._connections)))
        except AerieError as error:
            self._heard.put((place, error))
        except Exception as error:  # a thread that dies silently would leave the others waiting for its answer
            self._heard.put((place, ServerFailed(f"{type(error).__name__}: {error}", remedy="report this")))

    def _again(self, place: int, error: AerieError) -> None:
        """Put a request that failed back, or raise why it failed."""
        busy = isinstance(error, ServerBusy)
        if busy and self._answered > self._turned_away_at.get(place, -1):
            self._tries[place] = 0
        if busy:
            self._turned_away_at[place] = self._answered
        self._tries[place] += 1
        if not error.retryable or self._tries[place] >= TRIES:
            raise error
        if (pause := pause_s(error, self._tries[place])) > MOST_PAUSE_S:
            raise error
        now = time.monotonic()
        if busy:
            self._pace.refused()
            self._quiet_until = max(self._quiet_until, now + float(error.context.get("retry_after_s") or 0.0))
        heapq.heappush(self._due, (now + pause, place))

    def abandon(self) -> None:
        """Break off what is in flight."""
        self._connections.close()


def _tokens_of(answer: Mapping[str, Any]) -> int:
    """Tokens that an answer cost, by SGLang's count or OpenAI's; 0 where it does not say."""
    counts = answer.get("meta_info") or answer.get("usage")
    said = [counts.get(name) for name in ("prompt_tokens", "completion_tokens")] if isinstance(counts, dict) else []
    return sum(count for count in said if is_count(count))
