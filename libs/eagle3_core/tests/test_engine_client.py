"""Many requests to an engine: every one is answered once, what can pass is sent again, what cannot ends the whole."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from eagle3_core.engine import client as client_module
from eagle3_core.engine.client import Client
from eagle3_core.engine.concurrency import Concurrency
from eagle3_core.engine.refusals import RequestRefused, ServerBusy, ServerFailed


class Loopback(ThreadingHTTPServer):
    """A server that answers as a test says, and counts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: Counter[int] = Counter()
        self.now, self.most = 0, 0
        self.lock = threading.Lock()
        self.answer: Any = lambda body, time: (200, {"echo": body["n"], "meta_info": {"prompt_tokens": 1}})
        self.gate: threading.Event | None = None
        self.headers: dict[str, str] = {}

    @property
    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.server_address[1]}")


class _Handler(BaseHTTPRequestHandler):
    server: Loopback

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked[body["n"]] += 1
            time = self.server.asked[body["n"]]
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        if self.server.gate is not None:
            self.server.gate.wait()
        with self.server.lock:
            self.server.now -= 1
        status, said = self.server.answer(body, time)
        data = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    monkeypatch.setattr(client_module, "PAUSE_S", 0.001)
    with Loopback() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def bodies(count: int) -> list[dict[str, int]]:
    return [{"n": n} for n in range(count)]


def test_every_request_is_answered_once_with_its_place(server: Loopback) -> None:
    answers = dict(server.client.each(bodies(40), most=8))

    assert {place: answer["echo"] for place, answer in answers.items()} == {n: n for n in range(40)}
    assert set(server.asked.values()) == {1}
    assert server.most <= 8


def test_no_requests_are_no_answers(server: Loopback) -> None:
    assert list(server.client.each([], most=8)) == []


def test_a_request_that_is_turned_away_is_sent_again(server: Loopback) -> None:
    server.answer = lambda body, time: (503, {}) if body["n"] == 3 and time < 3 else (200, {"echo": body["n"]})

    answers = dict(server.client.each(bodies(6), most=4))

    assert len(answers) == 6
    assert server.asked[3] == 3


def test_a_server_that_always_turns_away_is_given_up_after_some_tries(server: Loopback) -> None:
    server.answer = lambda body, time: (503, {})

    with pytest.raises(ServerBusy, match="answered 503"):
        list(server.client.each(bodies(1), most=4))

    assert server.asked[0] == client_module.TRIES


def test_a_request_that_is_turned_away_while_others_are_answered_waits_for_its_turn(server: Loopback) -> None:
    server.answer = lambda body, time: (429, {}) if body["n"] == 0 and time < 20 else (200, {"echo": body["n"]})

    answers = dict(server.client.each(bodies(200), most=1))

    assert len(answers) == 200
    assert server.asked[0] == 20 > client_module.TRIES


@pytest.mark.parametrize(
    ("said", "least"), [("7", 7.0), ("Fri, 01 Jan 2100 00:00:00 GMT", 1e9), ("soon", 0.0), ("", 0.0), ("-5", 0.0)]
)
def test_a_server_that_says_when_to_come_back_is_left_alone_until_then(
    server: Loopback, said: str, least: float
) -> None:
    server.answer = lambda body, time: (429, {})
    server.headers = {"Retry-After": said}

    with pytest.raises(ServerBusy) as caught:
        server.client.post("/generate", {"n": 0})

    pauses = [client_module.pause_s(caught.value, tries) for tries in (1, 2, 3)]
    assert all(pause > least for pause in pauses)
    assert least or max(pauses) < 1


def test_a_server_that_wants_to_be_left_alone_for_long_is_left_to_a_later_attempt(server: Loopback) -> None:
    server.answer = lambda body, time: (503, {})
    server.headers = {"Retry-After": "86400"}

    with pytest.raises(ServerBusy) as caught:
        list(server.client.each(bodies(1), most=1))

    assert server.asked[0] == 1
    assert caught.value.retryable


def test_requests_that_were_turned_away_together_do_not_come_back_together() -> None:
    busy = ServerBusy("busy", retry_after_s=0.0)

    assert len({client_module.pause_s(busy, 1) for _ in range(20)}) > 1


def test_a_question_is_asked_again_like_a_request(server: Loopback) -> None:
    server.answer = lambda body, time: (503, {}) if time < 3 else (200, {"echo": 0})
    client = server.client

    assert client.patiently("/tokenize", {"n": 0}, lambda: None) == {"echo": 0}


def test_an_answer_without_end_is_not_read_to_its_end(server: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MOST_ANSWER_BYTES", 1000)
    server.answer = lambda body, time: (200, b'"' + b"x" * 2000 + b'"')

    with pytest.raises(ServerFailed, match="more than 1000 bytes"):
        server.client.post("/generate", {"n": 0})


def test_a_refusal_ends_the_whole_at_once_in_the_servers_words(server: Loopback) -> None:
    server.answer = lambda body, time: (400, {"error": {"message": "input_ids is longer than the model takes"}})

    with pytest.raises(RequestRefused, match="longer than the model takes"):
        list(server.client.each(bodies(1), most=4))

    assert server.asked[0] == 1


def test_an_answer_that_is_no_json_is_the_servers_fault(server: Loopback) -> None:
    server.answer = lambda body, time: (200, b"<html>gateway</html>")

    with pytest.raises(ServerFailed, match="got no answer"):
        server.client.post("/generate", {"n": 1})


def test_a_server_that_is_not_there_is_an_error_with_its_address() -> None:
    with pytest.raises(ServerFailed, match=r"127\.0\.0\.1:1/generate got no answer"):
        Client("http://127.0.0.1:1").post("/generate", {"n": 1})


def test_what_the_caller_raises_ends_the_wait_for_answers(server: Loopback) -> None:
    server.gate = threading.Event()

    def stop() -> None:
        if server.asked[0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(server.client.each(bodies(2), most=2, check=stop))

    server.gate.set()


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(pace: Concurrency, clock: Clock, windows: int, rate: Any) -> list[int]:
    """The limits after each of `windows`, where `rate(limit)` is the engine's tokens per second."""
    seen: list[int] = []
    for _ in range(windows):
        limit = pace.limit
        clock.now += 2 * limit * 10 / rate(limit)
        for _ in range(2 * limit):
            pace.answered(10)
        seen.append(pace.limit)
    return seen


def test_the_limit_doubles_while_the_engine_grows_faster_and_goes_back_where_it_did_not() -> None:
    clock = Clock()

    limits = run(Concurrency(256, clock), clock, 7, lambda limit: min(limit, 32) * 100.0)

    assert limits == [8, 16, 32, 64, 32, 32, 32]


def test_the_limit_never_exceeds_what_may_be_in_flight() -> None:
    clock = Clock()

    assert max(run(Concurrency(20, clock), clock, 9, lambda limit: limit * 100.0)) == 20


def test_an_engine_that_turns_away_gets_half_and_then_one_more_at_a_time() -> None:
    clock = Clock()
    pace = Concurrency(64, clock)
    assert run(pace, clock, 3, lambda limit: limit * 100.0) == [8, 16, 32]

    pace.refused()

    assert pace.limit == 16
    assert run(pace, clock, 3, lambda limit: 100.0) == [17, 18, 19]


def test_a_steady_limit_is_there_from_the_start_and_stays_whatever_the_rate() -> None:
    clock = Clock()
    pace = Concurrency(16, clock, steady=True)

    assert pace.limit == 16
    assert run(pace, clock, 3, lambda limit: 1.0) == [16, 16, 16]
