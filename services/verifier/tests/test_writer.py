"""Whatever becomes of a sample, one message says it; and a slow sink holds back who fills it."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from aerie_verifier.gathering import Chunk
from aerie_verifier.writer import BackgroundWriter, Captured, Origin, SinkStalled
from eagle3_core.digests import digest_bytes
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.protocol import StoreFull
from eagle3_core.verifier.receipt import Receipt, prompt_digest

ORIGIN = Origin((2, 4, 5), "pre", "0.5.23", "0.1.0")


class Told:
    """Collects messages, and lets a test wait for one."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._came = threading.Semaphore(0)

    def __call__(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._came.release()

    def wait(self) -> dict[str, Any]:
        assert self._came.acquire(timeout=60)
        return self.messages[-1]


class FullStore(LocalStore):
    """A disk that is full until it is told otherwise."""

    full = True

    def put_bytes(self, key: str, data: bytes) -> None:
        if self.full:
            raise StoreFull(f"no room for {key}", remedy="free disk space")
        super().put_bytes(key, data)


class SlowStore(LocalStore):
    """A sink that takes nothing before it is let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reached, self.go = threading.Event(), threading.Event()

    def put_bytes(self, key: str, data: bytes) -> None:
        self.reached.set()
        assert self.go.wait(60)
        super().put_bytes(key, data)


def sample(rid: str = "a", tokens: int = 7) -> Captured:
    part = Chunk(torch.randn(tokens, 12, dtype=torch.bfloat16), torch.randn(tokens, 4, dtype=torch.bfloat16))
    return Captured(rid, f"captures/r/{rid}.safetensors", list(range(tokens)), [part])


def writer(store: LocalStore, told: Told, *, queue_bytes: int = 1 << 20, stall_s: float = 60.0) -> BackgroundWriter:
    return BackgroundWriter(store, ORIGIN, told, queue_bytes=queue_bytes, writers=1, stall_s=stall_s)


def test_a_receipt_names_an_object_that_is_there_and_digests_that_fit(tmp_path: Path) -> None:
    told, captured = Told(), sample()
    out = writer(LocalStore(tmp_path), told)

    out.submit(captured)
    receipt = Receipt.model_validate(told.wait()["receipt"])
    out.close()

    data = (tmp_path / receipt.key).read_bytes()
    assert (receipt.tokens, receipt.size, receipt.digest) == (7, len(data), digest_bytes(data))
    assert receipt.prompt_digest == prompt_digest(range(7))
    assert (receipt.aux_layers, receipt.final, receipt.dtype) == ((2, 4, 5), "pre", "bfloat16")
    assert torch.equal(load(data)["aux"], captured.parts[0].aux_n3H)


def test_a_full_disk_is_told_to_the_request_and_later_ones_are_written(tmp_path: Path) -> None:
    told, store = Told(), FullStore(tmp_path)
    out = writer(store, told)

    out.submit(sample("a"))
    refused = told.wait()
    store.full = False
    out.submit(sample("b"))
    written = told.wait()
    out.close()

    assert (refused["rid"], refused["problem"]["code"]) == ("a", "store.full")
    assert (written["rid"], "receipt" in written) == ("b", True)


def test_a_sink_slower_than_prefill_holds_prefill_back_and_loses_nothing(tmp_path: Path) -> None:
    told, store = Told(), SlowStore(tmp_path)
    out = writer(store, told, queue_bytes=sample().size)
    out.submit(sample("a"))
    assert store.reached.wait(60)

    second = threading.Thread(target=out.submit, args=(sample("b"),))
    second.start()
    second.join(0.2)  # nothing may happen meanwhile: were it not held back, it would be through in a millisecond
    held_back = second.is_alive()
    store.go.set()
    second.join(60)
    out.close()

    assert held_back
    assert [m["rid"] for m in told.messages if "receipt" in m] == ["a", "b"]


def test_a_sink_that_stands_still_is_an_error_and_no_endless_wait(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    out = writer(store, Told(), queue_bytes=1, stall_s=0.05)
    out.submit(sample("a"))

    with pytest.raises(SinkStalled, match="have waited"):
        out.submit(sample("b"))

    store.go.set()
    out.close()
