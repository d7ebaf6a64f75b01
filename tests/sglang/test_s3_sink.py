"""States go to a real S3 store as they go to a folder: whole, through a bad week, a slow day and a full disk.

The store is the one that all tests use (`tests/servers`); between it and the engine stands the proxy that breaks requests.
The queue holds one sample, so the store's pace is the engine's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from captured import job_captured_by
from conftest import AUX_LAYERS, Launch
from references import Reference, cosine, stored
from servers.faults import FaultProxy, Schedule
from servers.s3 import OwnServer

from eagle3_core.digests import digest_bytes
from eagle3_core.engine.config import CaptureConfig
from eagle3_core.engine.server import Server
from eagle3_core.objects.location import store_at
from eagle3_core.objects.manifest import read_manifest
from eagle3_core.objects.protocol import StoreFull
from eagle3_core.objects.s3 import SMALL_BYTES
from eagle3_core.shards.reader import ShardSet
from eagle3_core.testing import tiny_verifier
from eagle3_core.verifier.receipt import Receipt

IN_FLIGHT, VOCAB = 6, 320
LONG = 1900
"""Tokens whose states are too large for one request to the store."""


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that the states of a long prompt are more than the store takes in one request."""
    return tiny_verifier(tmp_path_factory.mktemp("verifier") / "tiny", hidden=64)


@pytest.fixture(scope="module")
def proxy(s3: OwnServer) -> Iterator[FaultProxy]:
    """Between the engine and the store. A test says what is broken on the way."""
    with FaultProxy(s3.port, Schedule(0, share=0)) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def reference(verifier: Path) -> Reference:
    return Reference(verifier)


@pytest.fixture(scope="module")
def server(launch: Launch, verifier: Path, s3: OwnServer, proxy: FaultProxy) -> Server:
    sink = s3.url("states", proxy.endpoint)
    return launch(verifier, capture=CaptureConfig(sink=sink, aux_layers=AUX_LAYERS, queue_bytes=1))


class Captures:
    """Captures prompts, many in flight, and holds what lies in the store against Hugging Face."""

    def __init__(self, server: Server, s3: OwnServer, reference: Reference) -> None:
        self.server, self.url, self.reference = server, s3.url("states"), reference

    def worst(self, lengths: list[int]) -> float:
        """Least cosine of any state of prompts of `lengths` tokens."""
        draw = random.Random(len(lengths))
        asked = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
        with ThreadPoolExecutor(IN_FLIGHT) as clients:
            receipts = list(clients.map(self.server.capture, asked))
        return min(self._worst(ids, receipt) for ids, receipt in zip(asked, receipts, strict=True))

    def _worst(self, ids: list[int], receipt: Receipt) -> float:
        data, have = store_at(self.url).get_bytes(receipt.key), stored(self.url, receipt)
        assert (receipt.tokens, receipt.size, receipt.digest) == (len(ids), len(data), digest_bytes(data))
        assert have["input_ids"].tolist() == ids
        inputs, prenorm, _ = self.reference.states(ids)
        want = [*(inputs[layer] for layer in AUX_LAYERS), prenorm]
        return min(cosine(a, b) for a, b in zip([*have["aux"].chunk(3, -1), have["final"]], want, strict=True))


@pytest.fixture(scope="module")
def captures(server: Server, s3: OwnServer, reference: Reference) -> Captures:
    return Captures(server, s3, reference)


def test_states_in_the_store_are_those_of_hugging_face_also_where_they_go_up_in_parts(captures: Captures) -> None:
    lengths = [5, 40, 64, 65, 300, LONG]

    assert 4 * 4 * 64 * LONG > SMALL_BYTES  # float32, four states of 64 for each token
    assert captures.worst(lengths) >= 0.99999


def test_a_store_that_fails_and_breaks_off_costs_time_and_no_state(captures: Captures, proxy: FaultProxy) -> None:
    proxy.schedule = Schedule(1, ("slow_down", "internal_error", "reset", "half_upload", "lost_answer"), share=0.5)

    worst = captures.worst([30 + 9 * i for i in range(12)])

    assert worst >= 0.99999
    assert len(proxy.schedule.done) > 4, proxy.schedule.done


def test_a_store_slower_than_prefill_holds_prefill_back_and_every_state_comes(
    captures: Captures, proxy: FaultProxy
) -> None:
    proxy.schedule = Schedule(2, ("slow",), share=1.0, limit=1)

    worst = captures.worst([50] * IN_FLIGHT)

    assert worst >= 0.99999
    assert proxy.schedule.done["slow"] >= IN_FLIGHT


def test_a_full_store_is_told_to_the_request_and_later_ones_are_captured(captures: Captures, proxy: FaultProxy) -> None:
    proxy.schedule = Schedule(3, ("full",), share=1.0, most=1)

    with pytest.raises(StoreFull, match="no room"):
        captures.server.capture(list(range(10, 90)))

    assert proxy.schedule.done["full"] == 1
    assert captures.worst([80]) >= 0.99999


def test_a_job_fetches_its_states_from_a_running_servers_store_through_a_bad_week_and_leaves_none_there(
    server: Server,
    s3: OwnServer,
    proxy: FaultProxy,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain, store = job_captured_by(server, tmp_path, monkeypatch)
    states = store_at(s3.url("states"))
    before = [entry.key for entry in states.list("")]
    proxy.schedule = Schedule(4, ("slow_down", "internal_error", "reset", "half_upload", "lost_answer"), share=0.3)

    outcome = chain.run("extract")

    assert len(proxy.schedule.done) > 2, proxy.schedule.done
    assert outcome.result["checked"] == outcome.result["agreed"] > 0
    shards = ShardSet(store, [read_manifest(store, output.manifest) for output in outcome.outputs], tmp_path)
    assert len(shards) == outcome.result["samples"] > 0
    for sample in map(shards.sample, range(len(shards))):
        inputs, prenorm, _ = reference.states(sample.input_ids.tolist())
        want = [*(inputs[layer] for layer in AUX_LAYERS), prenorm[sample.final_index.long()]]
        have = [*sample.aux.float().chunk(3, -1), sample.final.float()]
        assert min(cosine(a, b) for a, b in zip(have, want, strict=True)) >= 0.9999
    assert [entry.key for entry in states.list("")] == before
