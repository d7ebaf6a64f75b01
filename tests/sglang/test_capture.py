"""What a capturing server stores is what Hugging Face computes, whatever the scheduler does in between.

What goes wrong is told to the request that it concerns, and the server goes on. One server for all, whose processes are
spawned as the engine does it, and whose queue holds one sample: every capture waits for the one before it to be written.
Its KV cache is small and its scheduler hopeful, so requests that decode are taken back for lack of memory.
"""

from __future__ import annotations

import json
import resource
import select
import signal
import socket
from collections.abc import Generator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import AUX_LAYERS, CPU_ARGS, SPAWNED, Launch, capture_to
from house import wait_for
from prompts import IN_FLIGHT, PROMPTS, VOCAB, prompts
from references import Reference, cosine, stored

from aerie_verifier.frontdoor import CaptureRefused
from aerie_verifier.writer import SinkFailed
from eagle3_core.digests import digest_bytes
from eagle3_core.engine.capture import capture_request, receipt_of
from eagle3_core.engine.refusals import ServerFailed
from eagle3_core.engine.server import Server
from eagle3_core.objects.location import store_at
from eagle3_core.objects.protocol import StoreFull
from eagle3_core.testing import tiny_verifier
from eagle3_core.verifier.receipt import prompt_digest

KV_TOKENS, LONG, MANY = 1024, 450, 12
"""Tokens that the KV cache holds, and of a prompt that several passes compute; prompts, of which one is in the middle."""


@pytest.fixture(scope="module")
def census(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engine says, on SIGUSR1, of how many prompts it holds states."""
    return tmp_path_factory.mktemp("census") / "held"


@pytest.fixture(scope="module")
def server(launch: Launch, verifier: Path, sink: Path, census: Path) -> Server:
    environment = {
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",  # seconds between two looks whether a client is still there
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16",  # tokens of its answer for which a request needs room to begin
        "AERIE_CPU_ENGINE_CENSUS": str(census),
    }
    return launch(
        verifier, SPAWNED | environment, capture=capture_to(sink, queue_bytes=1), max_total_tokens=KV_TOKENS,
        engine_args=(*CPU_ARGS, "--log-level", "debug"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def reference(verifier: Path) -> Reference:
    return Reference(verifier)


def long_prompt(number: int) -> list[int]:
    """The token ids of one of many long prompts that begin differently."""
    return [3 + (17 * i * i + 5 * i + 31 * number) % (VOCAB - 3) for i in range(LONG)]


def held_right(sink: Path, reference: Reference, ids: list[int], answer: dict[str, Any]) -> bool:
    """Whether the states that `answer` names are those of the prompt `ids`."""
    have = stored(sink.as_uri(), receipt_of(answer, ids))
    layers, prenorm, _ = reference.states(ids)
    pairs = [*zip(have["aux"].chunk(3, -1), (layers[i] for i in AUX_LAYERS), strict=True), (have["final"], prenorm)]
    return have["input_ids"].tolist() == ids and min(cosine(a, b) for a, b in pairs) >= 0.99999


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


def test_a_capture_that_the_engine_takes_back_in_the_middle_and_runs_again_is_right(
    server: Server, sink: Path, reference: Reference
) -> None:
    asked = [long_prompt(i) for i in range(MANY)]

    with ThreadPoolExecutor(len(asked)) as clients:
        answers = [clients.submit(server.post, "/generate", capture_request(ids)) for ids in asked]
        wait(answers, return_when=FIRST_COMPLETED)  # now another one is being computed
        server.post("/pause_generation", {"mode": "retract"})
        flushed = server.client.status("/flush_cache")  # nothing runs: what was computed of the prompts is gone
        server.post("/continue_generation", {})

    found = [answer.result() for answer in answers]
    assert flushed == 200
    assert sum(answer["meta_info"]["num_retractions"] for answer in found) == 1
    assert all(held_right(sink, reference, ids, answer) for ids, answer in zip(asked, found, strict=True))


def test_captures_beside_requests_that_are_taken_back_for_lack_of_memory_are_right(
    server: Server, sink: Path, reference: Reference
) -> None:
    asked = [long_prompt(i) for i in range(20, 26)]
    params = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}

    with ThreadPoolExecutor(6 + len(asked)) as clients:
        chats = [
            clients.submit(server.post, "/generate", {"input_ids": long_prompt(i)[:20], "sampling_params": params})
            for i in range(30, 36)
        ]
        found = list(clients.map(lambda ids: server.post("/generate", capture_request(ids)), asked))

    assert sum(chat.result()["meta_info"]["num_retractions"] for chat in chats) > 0
    assert all(held_right(sink, reference, ids, answer) for ids, answer in zip(asked, found, strict=True))


def test_weights_that_somebody_sends_in_the_middle_of_a_prompt_are_refused_and_its_states_are_of_one_model(
    server: Server, sink: Path, reference: Reference, tmp_path: Path
) -> None:
    other, asked = tiny_verifier(tmp_path / "other", seed=1), [long_prompt(i) for i in range(40, 40 + MANY)]

    with ThreadPoolExecutor(MANY) as clients:
        answers = [clients.submit(server.post, "/generate", capture_request(ids)) for ids in asked]
        wait(answers, return_when=FIRST_COMPLETED)  # now another one is being computed
        server.post("/pause_generation", {"mode": "in_place"})  # which is how the engine takes weights at once
        for route in ("update_weights_from_disk", "begin_weight_update"):
            with pytest.raises(ServerFailed, match=f"answered 409.*{route} would change the model"):
                server.post(f"/{route}", {"model_path": str(other), "flush_cache": False})
        server.post("/continue_generation", {})

    assert all(held_right(sink, reference, ids, answer.result()) for ids, answer in zip(asked, answers, strict=True))


def held_by_the_engine(server: Server, census: Path) -> int:
    """Of how many prompts the engine holds states."""
    census.unlink(missing_ok=True)
    (scheduler,) = [
        process
        for process in psutil.Process(server.pid).children(recursive=True)
        if "sglang::scheduler" in " ".join(process.cmdline())
    ]
    scheduler.send_signal(signal.SIGUSR1)
    return int(wait_for("the engine's census", lambda: census.exists() and census.read_text()))


def test_a_client_that_leaves_in_the_middle_of_its_prompt_leaves_no_file_no_states_and_nothing_waiting(
    server: Server, sink: Path, reference: Reference, census: Path
) -> None:
    before, past = set(sink.rglob("*")), len(server.log.read_bytes())
    names = {f"leaving-{i}" for i in range(10, 10 + MANY)}

    def said(words: str) -> set[str]:
        lines = server.log.read_bytes()[past:].decode().splitlines()
        return {name for name in names if any(words in line and f"'{name}'" in line for line in lines)}

    def answered() -> set[str]:
        return names & {path.stem for path in sink.rglob("*.safetensors")}

    with ExitStack() as connected:
        clients = [connected.enter_context(socket.create_connection((server.config.host, server.port))) for _ in names]
        for i, (name, client) in enumerate(zip(names, clients, strict=True)):
            body = json.dumps({"rid": name, **capture_request(long_prompt(100 + i))})
            head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(f"POST /generate HTTP/1.1\r\n{head}{body}".encode())
        select.select(clients, [], [])  # one has its receipt: now another one is being computed
        server.post("/pause_generation", {"mode": "in_place"})
    wait_for("the engine to see who left", lambda: said("Abort request obj.rid=") | answered() == names)
    gone = said("Abort request obj.rid=")
    server.post("/continue_generation", {})
    ids = long_prompt(200)
    answer = server.post("/generate", capture_request(ids))

    assert held_right(sink, reference, ids, answer)
    assert len(said("Abort chunked prefill request.")) == 1
    new = {path.name for path in set(sink.rglob("*")) - before}
    assert new == {f"{name}.safetensors" for name in {*(names - gone), answer["meta_info"]["id"]}}
    assert held_by_the_engine(server, census) == 0


def test_a_request_for_a_longer_answer_with_states_is_refused_with_the_reason(server: Server) -> None:
    body = {"input_ids": [5, 6, 7], "return_hidden_states": True, "sampling_params": {"max_new_tokens": 4}}

    with pytest.raises(CaptureRefused, match="max_new_tokens 1"):
        server.post("/generate", body)
