"""The way to a server that somebody else runs: busy, broken, pointing elsewhere, closed without a key, or not allowed at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from endpoint_house import TRAIN, House, Serve, answers_of, expected
from running_server import RunningServer

from eagle3_core.engine.allowed import EndpointKeyRefused, EndpointNotAllowed
from eagle3_core.engine.refusals import EndpointDown, KeyNotTaken, Redirected
from eagle3_core.testing import RecordingReporter


def in_place_of_an_answer(status: int, **headers: str) -> Callable[..., bool]:
    """Says `status` the first two times that an answer is asked for."""

    def before(handler: Any, body: dict[str, Any], time: int) -> bool:
        if time <= 2:
            handler.say(status, {"error": {"message": "later"}}, **headers)
        return time <= 2

    return before


@pytest.mark.parametrize("status", [429, 503, 502])
def test_a_server_that_is_busy_for_a_while_answers_everything_in_the_end(
    status: int, house: House, serve: Serve
) -> None:
    server = serve(before=in_place_of_an_answer(status))

    answers, _ = answers_of(house.context(server, {}))

    assert {name: answers.sample(i)[0].tolist() for i, name in enumerate(answers.ids)} == expected(server, house)


def test_a_server_that_breaks_off_is_asked_again(house: House, serve: Serve) -> None:
    def cut(handler: Any, body: dict[str, Any], time: int) -> bool:
        if time == 1:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b'{"text": "the')
            handler.close_connection = True
        return time == 1

    server = serve(before=cut)

    answers, _ = answers_of(house.context(server, {}))

    assert len(answers) == TRAIN


def test_a_dead_server_is_an_error_that_names_it_and_may_pass(
    house: House, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve()
    monkeypatch.setenv("AERIE_ENDPOINTS", "http://127.0.0.1:1")

    with pytest.raises(EndpointDown, match=r"127\.0\.0\.1:1/model_info got no answer") as caught:
        answers_of(house.context("http://127.0.0.1:1", {}))

    assert caught.value.retryable


def test_a_redirect_is_not_followed_wherever_it_leads(house: House, serve: Serve) -> None:
    elsewhere = in_place_of_an_answer(307, Location="http://169.254.169.254/latest/meta-data/")
    server = serve(before=elsewhere)

    with pytest.raises(Redirected, match=r"points to http://169\.254\.169\.254.*no redirect") as caught:
        answers_of(house.context(server, {}))

    assert not caught.value.retryable


def test_a_server_that_is_not_listed_is_never_asked(
    house: House, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    monkeypatch.setenv("AERIE_ENDPOINTS", "https://models.example")

    with pytest.raises(EndpointNotAllowed, match=r"none of the servers that the operator lists$"):
        answers_of(house.context(server, {}))

    assert server.asked == []


KEY = "sk-opensesame-0123456789"


@pytest.fixture
def keyed(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """A server that wants a key, which the operator has."""
    server = serve(key=KEY)
    (tmp_path / "key").write_text(KEY + "\n")
    entry = {"file": str(tmp_path / "key"), "endpoint": server.url}
    keys = {"ours": entry, "theirs": {**entry, "tenants": ["others"]}, "elsewhere": {**entry, "endpoint": "https://b"}}
    monkeypatch.setenv("AERIE_ENDPOINT_KEYS", json.dumps(keys))
    return server


def test_a_key_is_named_by_the_job_and_shown_to_its_server_alone(house: House, keyed: RunningServer) -> None:
    ctx = house.context(keyed, {"key": "ours"})

    answers, _ = answers_of(ctx)

    assert len(answers) == TRAIN
    assert keyed.keys == {f"Bearer {KEY}"}
    assert isinstance(ctx.reporter, RecordingReporter)
    assert KEY not in ctx.assignment.model_dump_json() + str(ctx.reporter.lines) + str(dict(os.environ))


def test_a_key_that_the_server_repeats_in_its_refusal_is_hidden(
    house: House, keyed: RunningServer, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("wrong-key-0123456789")

    with pytest.raises(KeyNotTaken, match="answered 401") as caught:
        answers_of(house.context(keyed, {"key": "ours"}))

    assert "wrong-key" not in caught.value.text() + str(caught.value) + json.dumps(caught.value.problem())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("theirs", "no key named theirs for jobs of tenant"),
        ("none", "no key named none"),
        ("elsewhere", "another server"),
    ],
)
def test_a_key_for_somebody_else_or_another_server_is_not_used(
    name: str, words: str, house: House, keyed: RunningServer
) -> None:
    with pytest.raises(EndpointKeyRefused, match=words):
        answers_of(house.context(keyed, {"key": name}))

    assert keyed.asked == []
