"""Speaks to an SGLang server: one request, or many in flight whose answers come as they are ready.

Token ids go in and token ids come out; text would be tokenised again on the way, and not always to the same ids.
A request that the server turns away, or that fails for a reason that can pass, is sent again a few times; what else goes
wrong ends the whole, with the server's own words.
"""

from __future__ import annotations

import heapq
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from eagle3_core.engine.concurrency import Concurrency
from eagle3_core.errors import AerieError

ANSWER_S = 3600.0
"""Longest time that an answer may take: one of 32k tokens at 10 tokens a second, the slowest that is still of use."""
STATUS_S = 30.0
TRIES = 5
PAUSE_S = 0.5
"""Before the second try; doubled before each further one."""
LOOK_S = 0.5
"""How often a wait for answers looks whether to go on."""
BUSY = frozenset({429, 503})
"""Statuses by which a server says that it has too much to do."""


class ServerFailed(AerieError):
    """The verifier's server did not start, or ended, or answers what it should not."""

    code, status, retryable = "verifier.server", 502, True


class ServerBusy(AerieError):
    """The verifier's server turned a request away."""

    code, status, retryable = "verifier.busy", 503, True


class RequestRefused(ServerFailed):
    """The verifier's server does not take a request as it is."""

    code, status, retryable = "verifier.request", 502, False


def answered_error(status: int, body: bytes) -> AerieError:
    """The error that a server answered with: the plug-in's own where the message holds one."""
    text = body.decode(errors="replace")
    if status in BUSY:
        return ServerBusy(f"the server answered {status}: {text[:500]}", remedy="send fewer requests at a time")
    try:
        document = json.loads(text)
        message = document.get("message") or (document.get("error") or {}).get("message") or document.get("detail")
        return AerieError.from_problem(json.loads(message))
    except (ValueError, TypeError, AttributeError):
        kind = RequestRefused if 400 <= status < 500 else ServerFailed
        return kind(f"the server answered {status}: {text[:500]}", remedy="mend the request, or the server")


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
                    with suppress(OSError):
                        sock.shutdown(2)


class Client:
    """A server at an address."""

    def __init__(self, url: str, answer_s: float = ANSWER_S) -> None:
        """`url` like http://host:port; a path in it is put before every path that is asked."""
        parts = urlsplit(url)
        self.url, self._prefix, self._answer_s = url.rstrip("/"), parts.path.rstrip("/"), answer_s
        self._host, self._port = parts.hostname or "", parts.port
        self._secure = parts.scheme == "https"

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._answer_s)

    def status(self, path: str) -> int | None:
        """The status with which a GET is answered; None where nobody answers within a few seconds."""
        connection = self._connection()
        connection.timeout = STATUS_S
        try:
            connection.request("GET", self._prefix + path)
            with connection.getresponse() as answer:  # an answer that is not closed keeps its socket
                return answer.status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """The JSON answer to a GET. Raises ServerFailed, ServerBusy."""
        return self._ask("GET", path, None, Connections())

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to a JSON request. Raises ServerFailed, ServerBusy, and what the capture plug-in answers."""
        return self._ask("POST", path, body, Connections())

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, open_now: Connections) -> Any:
        connection = self._connection()
        open_now.add(connection)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._prefix + path, data, {"Content-Type": "application/json"})
            with connection.getresponse() as answer:
                said = answer.read()
            if answer.status != 200:
                raise answered_error(answer.status, said)
            return json.loads(said)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerFailed(
                f"{self.url}{path} got no answer: {type(error).__name__}: {error}",
                remedy="see whether the server still runs, and its log",
            ) from None
        finally:
            open_now.drop(connection)

    def each(
        self,
        bodies: Sequence[Mapping[str, Any]],
        *,
        most: int,
        steady: bool = False,
        path: str = "/generate",
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[int, Any]]:
        """The answers to `bodies`, each with its place among them, as they come; at most `most` in flight.

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

    def send(self, path: str, body: Mapping[str, Any], open_now: Connections) -> Any:
        """As `post`, over a connection that `open_now` knows."""
        return self._ask("POST", path, body, open_now)


class _Flight:
    """Requests in flight. Only its own thread touches it; the threads that ask put what they hear into a queue."""

    def __init__(self, client: Client, path: str, bodies: Sequence[Mapping[str, Any]], pace: Concurrency) -> None:
        self._client, self._path, self._bodies = client, path, bodies
        self._pace = pace
        self._due = [(0.0, i) for i in range(len(bodies))]  # a heap already: equal times, rising places
        self._tries = [0] * len(bodies)
        self._heard: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._connections = Connections()
        self._flying = 0

    @property
    def done(self) -> bool:
        """Whether every answer has come."""
        return not self._due and not self._flying

    def step(self) -> Iterator[tuple[int, Any]]:
        """Send what may be sent, then wait a moment for an answer."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now and self._flying < self._pace.limit:
            _, place = heapq.heappop(self._due)
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
            meta = heard.get("meta_info") or {}
            self._pace.answered(int(meta.get("prompt_tokens") or 0) + int(meta.get("completion_tokens") or 0))
            yield place, heard

    def _ask(self, place: int) -> None:
        try:
            self._heard.put((place, self._client.send(self._path, self._bodies[place], self._connections)))
        except AerieError as error:
            self._heard.put((place, error))
        except Exception as error:  # a thread that dies silently would leave the others waiting for its answer
            self._heard.put((place, ServerFailed(f"{type(error).__name__}: {error}", remedy="report this")))

    def _again(self, place: int, error: AerieError) -> None:
        """Put a request that failed back, or raise why it failed."""
        self._tries[place] += 1
        if not error.retryable or self._tries[place] >= TRIES:
            raise error
        if isinstance(error, ServerBusy):
            self._pace.refused()
        heapq.heappush(self._due, (time.monotonic() + PAUSE_S * 2 ** (self._tries[place] - 1), place))

    def abandon(self) -> None:
        """Break off what is in flight."""
        self._connections.close()
