"""Hands captured states to the sink, beside the engine.

The scheduler's thread only puts a sample on a queue. The queue is bounded in bytes: a sink that is slower than prefill
holds prefill back (that is all the flow control there is), and a sink that stands still stops the server with the reason.
Every sample ends in exactly one message: a receipt, once its bytes are safe, or the problem that kept them from it.

The object's format: a safetensors file of `input_ids` i32 [T], `aux` [T, 3H], `final` [T, H] in the engine's precision.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from aerie_verifier.container import container
from aerie_verifier.gathering import Chunk
from eagle3_core.digests import digest_bytes
from eagle3_core.errors import AerieError
from eagle3_core.objects.protocol import ObjectStore
from eagle3_core.verifier.receipt import Receipt, prompt_digest


class SinkStalled(AerieError):
    """The sink of captured states took nothing for longer than it may."""

    code, status, retryable = "capture.stalled", 503, True


class SinkFailed(AerieError):
    """Captured states could not be written."""

    code, status, retryable = "capture.sink", 507, True


@dataclass(frozen=True)
class Captured:
    """A prompt whose states are complete."""

    rid: str
    key: str
    ids: list[int]
    parts: list[Chunk]

    @property
    def size(self) -> int:
        """Bytes of its states in main memory."""
        return sum(p.aux_n3H.nbytes + p.final_nH.nbytes for p in self.parts)


@dataclass(frozen=True)
class Origin:
    """What every receipt of a server says of where the states come from."""

    aux_layers: tuple[int, int, int]
    final: str
    engine_version: str
    plugin_version: str


Tell = Callable[[dict[str, Any]], None]
"""Takes {"rid", "receipt"} or {"rid", "problem"}."""


class BackgroundWriter:
    """Threads that write to `store`, and the bounded queue before them."""

    def __init__(
        self, store: ObjectStore, origin: Origin, tell: Tell, *, queue_bytes: int, writers: int, stall_s: float
    ) -> None:
        self._store, self._origin, self._tell = store, origin, tell
        self._limit, self._stall_s = queue_bytes, stall_s
        self._changed = threading.Condition()
        self._waiting: deque[Captured] = deque()
        self._held_bytes = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"aerie-capture-{i}", daemon=True) for i in range(writers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, captured: Captured) -> None:
        """Queue a sample; waits while the queue is full. Raises SinkStalled."""
        deadline = time.monotonic() + self._stall_s
        with self._changed:
            while self._held_bytes and self._held_bytes + captured.size > self._limit:
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise SinkStalled(
                        f"{self._held_bytes} bytes of states have waited {self._stall_s:g} s for the sink",
                        remedy="use a faster sink, or more writers",
                    )
            self._held_bytes += captured.size
            self._waiting.append(captured)
            self._changed.notify_all()

    def close(self) -> None:
        """Write what waits, then end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (captured := self._next()) is not None:
            size = captured.size
            self._tell(self._outcome(captured))
            with self._changed:
                self._held_bytes -= size
                self._changed.notify_all()

    def _next(self) -> Captured | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return self._waiting.popleft() if self._waiting else None

    def _outcome(self, captured: Captured) -> dict[str, Any]:
        """Write `captured`; the message that says how it went."""
        try:
            return {"rid": captured.rid, "receipt": self._write(captured).model_dump(mode="json")}
        except AerieError as error:
            return failed(captured.rid, error)
        except Exception as error:  # a writer that dies silently would leave every later answer waiting
            reason = f"{captured.key} could not be written: {type(error).__name__}: {error}"
            return failed(captured.rid, SinkFailed(reason, remedy="repair the sink, then send the request again"))

    def _write(self, captured: Captured) -> Receipt:
        ids_T = torch.tensor(captured.ids, dtype=torch.int32)
        aux, final = [part.aux_n3H for part in captured.parts], [part.final_nH for part in captured.parts]
        data = container({"input_ids": [ids_T], "aux": aux, "final": final})
        self._store.put_bytes(captured.key, data)
        return Receipt(
            key=captured.key,
            tokens=len(captured.ids),
            prompt_digest=prompt_digest(captured.ids),
            size=len(data),
            digest=digest_bytes(data),
            dtype=str(aux[0].dtype).removeprefix("torch."),
            aux_layers=self._origin.aux_layers,
            final="pre" if self._origin.final == "pre" else "post",
            engine_version=self._origin.engine_version,
            plugin_version=self._origin.plugin_version,
        )


def failed(rid: str, error: AerieError) -> dict[str, Any]:
    """The message that a request's states are lost, and why."""
    return {"rid": rid, "problem": error.problem()}
