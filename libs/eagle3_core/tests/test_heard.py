"""What a server says is hidden of its key, bounded, and decides nothing: not what kind of error it is, nor how long one waits."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import pytest

from eagle3_core.engine import client as client_module
from eagle3_core.engine.client import Client
from eagle3_core.engine.heard import MOST_CHARS, AnswerWrong, Ear, count, part, part_or, token_ids
from eagle3_core.engine.refusals import EndpointDown, RequestRefused, ServerBusy
from eagle3_core.errors import AerieError

KEY = "sekrit+0123456789/abcdef\"ABCDEF'"
Speaks = Callable[[socket.socket], None]


@contextmanager
def saying(speak: bytes | Speaks) -> Generator[str]:
    """The address of a server that hears a request out and then says `speak`, to everyone who comes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    one, _ = listening.accept()
                except OSError:
                    return
                with one:
                    one.settimeout(10)
                    heard = b""
                    while b"\r\n\r\n" not in heard:
                        heard += one.recv(65536)
                    try:
                        one.sendall(speak) if isinstance(speak, bytes) else speak(one)
                    except OSError:
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def answer(status: int, body: bytes | Any, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} said", *headers, "Connection: close", f"Content-Length: {len(data)}", "", ""]
    return "\r\n".join(lines).encode() + data


def error_of(said: bytes | Speaks, answer_s: float = 60) -> AerieError:
    with saying(said) as url, pytest.raises(AerieError) as caught:
        Client(url, answer_s, key=KEY, failed=EndpointDown).get("/model_info")
    assert url in caught.value.detail
    return caught.value


def problem(code: Any, **more: Any) -> dict[str, Any]:
    return {"message": json.dumps({"code": code, "detail": "as it says", "status": 500, **more})}


WITH_KEY: dict[str, bytes] = {
    "body": answer(400, f"no: {KEY}".encode()),
    "bearer": answer(401, f"no: Bearer {KEY}".encode()),
    "in JSON": answer(401, {"error": {"message": KEY}}),
    "in a URL": answer(400, quote(KEY, safe="").encode()),
    "in base64": answer(400, base64.b64encode(KEY.encode())),
    "across the cut": answer(400, b"x" * (MOST_CHARS - 9) + KEY.encode()),
    "status line": f"GARBAGE {KEY}\r\n\r\n".encode(),
    "status": f"HTTP/1.1 {KEY}\r\n\r\n".encode(),
    "Location": answer(302, b"", f"Location: http://h/?k={KEY}"),
    "Location across the cut": answer(302, b"", f"Location: http://h/{'y' * 180}{KEY}"),
    "a problem": answer(400, problem("capture.request", detail=KEY, remedy=f"send {KEY}", context={"a": KEY}, title=KEY)),
    "an escaped problem": answer(400, json.dumps(problem("capture.sink", remedy=KEY)).replace("s", "\\u0073").encode()),
    "no JSON": answer(200, KEY.encode()),
}  # fmt: skip


@pytest.mark.parametrize("where", WITH_KEY)
def test_the_key_is_in_no_part_of_an_error_wherever_the_server_repeats_it(where: str) -> None:
    error = error_of(WITH_KEY[where])

    everything = json.dumps(error.problem()) + error.text() + str(error) + repr(error.args)
    assert not [piece for piece in (KEY[i : i + 6] for i in range(len(KEY) - 5)) if piece in everything]


def test_a_model_that_is_named_like_the_key_has_no_name() -> None:
    with saying(answer(200, {"data": [{"id": KEY}], KEY: 1})) as url:
        said = Client(url, key=KEY).get("/v1/models")

    assert said == {"data": [{"id": "[secret]"}], "[secret]": 1}


@pytest.mark.parametrize(
    "code",
    ["unit.preempted", "lease.lost", "job.paused", "unit.cancelled", "verifier.busy", "internal", "capture.new", [1], 5, None],
)  # fmt: skip
def test_a_server_cannot_choose_what_kind_of_error_its_answer_is(code: Any) -> None:
    error = error_of(answer(400, problem(code, remedy="pay us", retryable=True, context={"retry_after_s": "abc"})))

    assert type(error) is RequestRefused
    assert not error.retryable
    assert error.context == {}
    assert error.remedy == "mend the request, or the server"


@pytest.mark.parametrize(
    ("code", "retryable"), [("capture.request", False), ("capture.sink", True), ("store.full", True)]
)
def test_a_failure_of_the_plug_in_keeps_its_code_and_words_and_nothing_else_of_its_document(
    code: str, retryable: bool
) -> None:
    told = {"detail": "the sink is full", "remedy": "free room", "context": {"retry_after_s": 9}, "title": "t" * 9999}

    error = error_of(answer(400, problem(code, **told)))

    assert (error.code, error.retryable, error.context) == (code, retryable, {})
    assert error.detail.endswith("answered 400: the sink is full")
    assert error.remedy.endswith("says: free room")
    assert len(json.dumps(error.problem())) < 2000


@pytest.mark.parametrize(
    "words", [b"x" * 3_000_000, json.dumps(problem("capture.sink", detail="x" * 3_000_000)).encode()]
)
def test_a_long_story_makes_no_long_error(words: bytes) -> None:
    assert len(json.dumps(error_of(answer(500, words)).problem())) < 2000


@pytest.mark.parametrize(
    "body", [b"[" * 200_000 + b"]" * 200_000, b'{"a":' * 70 + b"1" + b"}" * 70, b"[1]", b"5", b"null", b"", b"\xff", b"1" * 5000]
)  # fmt: skip
def test_an_answer_that_is_no_object_or_too_deep_is_the_servers_fault(body: bytes) -> None:
    assert type(error_of(answer(200, body))) is EndpointDown


@pytest.mark.parametrize(
    "when", ["9" * 400, "Fri, 31 Dec 9999 23:59:59 GMT", "Fri, 31 Dec 99999999999999 23:59:59 GMT", "²", "nan"]
)
def test_whenever_a_server_wants_to_be_asked_again_it_is_a_time_that_a_clock_knows(when: str) -> None:
    error = error_of(answer(429, b"{}", f"Retry-After: {when}"))

    assert isinstance(error, ServerBusy)
    assert 0 <= client_module.pause_s(error, 1) < 1e11


def drip(head: bytes, drop: bytes) -> Speaks:
    """Says `drop` over and over, until the other side has had enough."""

    def speak(one: socket.socket) -> None:
        one.sendall(head)
        while True:
            one.sendall(drop)
            threading.Event().wait(0.01)

    return speak


def silent(one: socket.socket) -> None:
    """Says nothing until the other side hangs up."""
    one.recv(1)


@pytest.mark.parametrize(
    ("head", "drop"),
    [(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n", b" "), (b"HTTP/1.1 200 OK\r\n", b"X"), (b"", b"H"),
     (b"", b"HTTP/1.1 100 Continue\r\n\r\n"), (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n")],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_an_answer_that_comes_drop_by_drop_is_not_waited_for_longer_than_an_answer_may_take(
    head: bytes, drop: bytes
) -> None:
    assert type(error_of(drip(head, drop), answer_s=0.3)) is EndpointDown


@pytest.mark.timeout(20)
def test_a_server_that_says_nothing_about_itself_is_not_waited_for_as_for_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "STATUS_S", 0.2)

    assert isinstance(error_of(silent), EndpointDown)


@pytest.mark.timeout(20)
def test_a_wait_for_what_a_server_says_of_itself_is_ended_by_whoever_cancels() -> None:
    asked = threading.Event()

    def hear(one: socket.socket) -> None:
        asked.set()
        silent(one)

    def cancel() -> None:
        if asked.is_set():
            raise KeyboardInterrupt

    with saying(hear) as url, pytest.raises(KeyboardInterrupt):
        Client(url).patiently("/model_info", None, cancel)


def test_parts_of_an_answer_are_of_their_kind_or_an_error_says_so() -> None:
    document = {"usage": 5, "none": None, "n": 1 << 40, "ids": [1, True], "more": [1 << 40]}

    for ask in (
        lambda: part(document, "usage", dict), lambda: part_or(document, "usage", {}), lambda: part([], "usage", dict),
        lambda: count(document, "n"), lambda: token_ids(document["ids"], "ids"), lambda: token_ids(document["more"], "more"),
    ):  # fmt: skip
        with pytest.raises(AnswerWrong, match="the server's answer has"):
            ask()
    assert part_or(document, "none", {}) == {}
    assert count(document, "none") is None


def test_without_a_key_nothing_is_hidden() -> None:
    assert Ear().document('{"a": ["text", {"b": ""}]}') == {"a": ["text", {"b": ""}]}
