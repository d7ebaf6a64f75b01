"""What a capturing server stores is what Hugging Face computes, whatever the scheduler does in between."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import AUX_LAYERS, Launch, capture_to
from references import Reference, cosine, stored

from eagle3_core.digests import digest_bytes
from eagle3_core.engine.server import Server
from eagle3_core.objects.location import store_at
from eagle3_core.verifier.receipt import prompt_digest

PROMPTS, SHORTEST, LONGEST, IN_FLIGHT, VOCAB = 50, 5, 600, 8, 320


@pytest.fixture(scope="module")
def server(launch: Launch, verifier: Path, sink: Path) -> Server:
    return launch(verifier, capture=capture_to(sink))


@pytest.fixture(scope="module")
def reference(verifier: Path) -> Reference:
    return Reference(verifier)


def prompts() -> list[list[int]]:
    """Prompts from the shortest to the longest; every fifth begins with the whole of the one before it."""
    draw, made = random.Random(0), []
    for i in range(PROMPTS):
        length = SHORTEST + (LONGEST - SHORTEST) * i // (PROMPTS - 1)
        head = made[-1] if i % 5 == 4 else []
        made.append(head + [draw.randrange(3, VOCAB) for _ in range(length - len(head))])
    return made


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


def test_a_repeated_prompt_is_captured_whole_although_the_prefix_cache_holds_it(server: Server) -> None:
    ids = list(range(10, 140))

    first, second = server.capture(ids), server.capture(ids)

    assert (first.tokens, second.tokens) == (130, 130)
    assert first.key != second.key


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
