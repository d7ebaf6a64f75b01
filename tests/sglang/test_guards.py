"""What goes wrong while a server captures is told to the request that it concerns, and the server goes on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from conftest import Launch, capture_to

from aerie_verifier.frontdoor import CaptureRefused
from aerie_verifier.writer import SinkFailed
from eagle3_core.engine.server import Server


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
