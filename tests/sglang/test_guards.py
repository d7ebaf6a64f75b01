"""Servers that would capture something else, or lose it: each is stopped, or says so, and goes on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from conftest import CPU_ARGS, Launch, capture_to, cpu_server

from aerie_verifier.frontdoor import CaptureRefused
from aerie_verifier.launcher import Server, ServerFailed
from aerie_verifier.writer import SinkFailed
from eagle3_core.testing import tiny_verifier


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("verifier") / "tiny")


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sink")


@pytest.fixture(scope="module")
def server(launch: Launch, verifier: Path, sink: Path) -> Server:
    return launch(verifier, capture=capture_to(sink, queue_bytes=1))


def test_a_sink_that_cannot_be_written_is_told_to_the_request_and_later_ones_are_captured(
    server: Server, sink: Path
) -> None:
    aside = (sink / "captures").rename(sink / "aside")
    (sink / "captures").write_text("a file where a folder should be")

    with pytest.raises(SinkFailed, match="could not be written"):
        server.capture(list(range(10, 90)))

    (sink / "captures").unlink()
    aside.rename(sink / "captures")
    assert server.capture(list(range(10, 90))).tokens == 80


def test_a_client_that_leaves_in_the_middle_leaves_nothing_waiting(server: Server) -> None:
    body = '{"input_ids": %s, "return_hidden_states": true, "sampling_params": {"max_new_tokens": 1}}' % ([7] * 2000)
    with socket.create_connection((server.config.host, server.port)) as left:
        head = (
            f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        left.sendall(f"{head}\r\n{body}".encode())

    assert server.capture(list(range(10, 200))).tokens == 190


def test_a_request_for_a_longer_answer_with_states_is_refused_with_the_reason(server: Server) -> None:
    body = {"input_ids": [5, 6, 7], "return_hidden_states": True, "sampling_params": {"max_new_tokens": 4}}

    with pytest.raises(CaptureRefused, match="max_new_tokens 1"):
        server.post("/generate", body)


def test_a_server_that_is_told_other_layers_ends_with_both_lists(verifier: Path, sink: Path, tmp_path: Path) -> None:
    other = (*CPU_ARGS, "--return-aux-hidden-state-layer-ids", "2", "4", "5")

    with (
        pytest.raises(ServerFailed, match=r"inputs of layers \[3, 5, 6\], the configuration wants \[2, 4, 5\]"),
        cpu_server(verifier, tmp_path / "log", capture=capture_to(sink), engine_args=other),
    ):
        pass


def test_a_server_that_would_draft_while_it_captures_does_not_start(verifier: Path, sink: Path, tmp_path: Path) -> None:
    drafting = (*CPU_ARGS, "--speculative-draft-model-path", str(verifier))

    with (
        pytest.raises(ServerFailed, match="captures without a draft"),
        cpu_server(verifier, tmp_path / "log", capture=capture_to(sink), engine_args=drafting),
    ):
        pass
