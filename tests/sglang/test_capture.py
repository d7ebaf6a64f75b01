"""What a capturing server stores is what Hugging Face computes, whatever the scheduler does in between.

What goes wrong is told to the request that it concerns, and the server goes on. One server for all, whose processes are
spawned as the engine does it, and whose queue holds one sample: every capture waits for the one before it to be written.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from conftest import AUX_LAYERS, SPAWNED, Launch, capture_to
from prompts import IN_FLIGHT, PROMPTS, prompts
from references import Reference, cosine, stored

from aerie_verifier.frontdoor import CaptureRefused
from aerie_verifier.writer import SinkFailed
from eagle3_core.digests import digest_bytes
from eagle3_core.engine.server import Server
from eagle3_core.objects.location import store_at
from eagle3_core.objects.protocol import StoreFull
from eagle3_core.verifier.receipt import prompt_digest


@pytest.fixture(scope="module")
def server(launch: Launch, verifier: Path, sink: Path) -> Server:
    return launch(verifier, SPAWNED, capture=capture_to(sink, queue_bytes=1))


@pytest.fixture(scope="module")
def reference(verifier: Path) -> Reference:
    return Reference(verifier)


def test_states_of_fifty_prompts_in_flight_together_equal_those_of_hugging_face(
    server: Server, sink: Path, reference: Reference
) -> None:
    asked = prompts()

    with ThreadPoolExecutor(IN_FLIGHT) as clients:
        receipts = list(clients.map(server.capture, asked))

    assert len({r.key for r in receipts}) == PROMPTS
    worst = dict.fromkeys(("aux 0", "aux 1", "aux 2", "final"), 1.0)
    for ids, receipt in zip(asked, receipts, strict=True):
        data = store_at(sink.as_uri()).get_bytes(receipt.key)
        have = stored(sink.as_uri(), receipt)
        assert (receipt.tokens, receipt.prompt_digest) == (len(ids), prompt_digest(ids))
        assert (receipt.size, receipt.digest) == (len(data), digest_bytes(data))
        assert have["input_ids"].tolist() == ids
        layers, prenorm, _ = reference.states(ids)
        for i, (layer, aux) in enumerate(zip(AUX_LAYERS, have["aux"].chunk(3, -1), strict=True)):
            worst[f"aux {i}"] = min(worst[f"aux {i}"], cosine(aux, layers[layer]))
        worst["final"] = min(worst["final"], cosine(have["final"], prenorm))
        torch.testing.assert_close(have["final"], prenorm, rtol=1e-4, atol=1e-3)
    assert min(worst.values()) >= 0.99999, worst


def test_a_repeated_prompt_is_captured_whole_although_the_prefix_cache_holds_it(
    server: Server, sink: Path, reference: Reference
) -> None:
    ids = list(range(10, 140))
    plain = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    held = [server.post("/generate", plain)["meta_info"]["cached_tokens"] for _ in range(2)]

    receipts = [server.capture(ids) for _ in range(2)]

    assert held[1] > 64  # else the prefix cache would not hold it, and nothing could go wrong
    assert len({receipt.key for receipt in receipts}) == 2
    layers, prenorm, _ = reference.states(ids)
    for receipt in receipts:
        have = stored(sink.as_uri(), receipt)
        torch.testing.assert_close(have["final"], prenorm, rtol=1e-4, atol=1e-3)
        for layer, aux in zip(AUX_LAYERS, have["aux"].chunk(3, -1), strict=True):
            assert cosine(aux, layers[layer]) >= 0.99999


def test_ordinary_requests_between_captures_are_answered_as_ever_and_leave_nothing_in_the_sink(
    server: Server, sink: Path
) -> None:
    ids, before = list(range(30, 130)), len(list(sink.rglob("*.safetensors")))
    plain = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 12}}

    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(server.post, "/generate", plain) for _ in range(3)]
        receipt = clients.submit(server.capture, ids).result()
        counts = [answer.result()["meta_info"]["completion_tokens"] for answer in answers]

    assert counts == [12, 12, 12]
    assert receipt.tokens == len(ids)
    assert len(list(sink.rglob("*.safetensors"))) == before + 1


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


@contextmanager
def no_file_longer_than(server: Server, size: int) -> Generator[None]:
    """Within the block the kernel lets no process of `server` but its first write further than `size` bytes into a file."""
    processes = [process.pid for process in psutil.Process(server.pid).children(recursive=True)]
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in processes}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
    yield
    for pid, limits in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def test_a_sink_without_room_is_told_to_the_request_leaves_no_part_behind_and_later_ones_are_captured(
    server: Server, sink: Path
) -> None:
    before = set(sink.rglob("*"))

    with no_file_longer_than(server, 50_000), pytest.raises(StoreFull, match="no room for captures/"):
        server.capture(list(range(10, 210)))

    assert set(sink.rglob("*")) == before
    assert server.capture(list(range(10, 210))).size > 50_000


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
