"""Batches read, decoded and uploaded beside the compute, in the order in which they will be trained on.

Decoding is disk, decompression and memcpy, all of which let go of Python's lock, so threads are enough. `workers` of
them fill a window of batches in host memory (pinned where a GPU will read it); one more uploads the next batch on a
stream of its own while the current one trains. So the device holds the batch in work and one ahead, never more.

Which thread decodes what changes nothing: a batch is a pure function of its samples.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from queue import SimpleQueue
from types import TracebackType

import torch
from torch import Tensor

from eagle3_core.drafter.step import PackedBatch
from eagle3_core.train.feed import Pass


@dataclass(frozen=True)
class _Arrived:
    """A batch on its device, and when it is whole there."""

    batch: PackedBatch | None
    uploaded: torch.cuda.Event | None


class Prefetch:
    """The batches of `passes`, one `take` after the other."""

    def __init__(
        self, load: Callable[[Pass], PackedBatch], passes: Iterable[Pass], device: torch.device, workers: int
    ) -> None:
        """`passes` may be endless: it is read as far ahead as the window is wide, in a thread of this object."""
        self._load, self._passes, self._device, self._workers = load, passes, device, workers
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: SimpleQueue[_Arrived | BaseException] = SimpleQueue()
        self._room = threading.Semaphore(1)
        self._closed = False
        self._decoders = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self._uploader = threading.Thread(target=self._run, name="upload", daemon=True)
        self.waited_s = 0.0
        """Time that `take` has waited."""

    def __enter__(self) -> Prefetch:
        """Begin to read ahead."""
        self._uploader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; what was read ahead is dropped."""
        self._closed = True
        self._room.release()
        self._uploader.join()
        self._decoders.shutdown(cancel_futures=True)

    def take(self) -> PackedBatch | None:
        """The next batch, None for an empty pass. Raises what reading it raised."""
        began = time.perf_counter()
        arrived = self._ready.get()
        self.waited_s += time.perf_counter() - began
        if isinstance(arrived, BaseException):
            raise arrived
        if arrived.uploaded is not None and arrived.batch is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(arrived.uploaded)
            for _, tensor in tensors_of(arrived.batch):
                tensor.record_stream(here)
        self._room.release()
        return arrived.batch

    def _run(self) -> None:
        """Keep a window of batches in decoding, and upload the first of them as soon as there is room."""
        window: deque[Future[PackedBatch | None]] = deque()
        ahead = iter(self._passes)
        try:
            while True:
                while len(window) <= self._workers and (samples := next(ahead, None)) is not None:
                    window.append(self._decoders.submit(self._decode, samples))
                if not window:
                    return
                batch = window.popleft().result()
                self._room.acquire()
                if self._closed:
                    return
                self._ready.put(self._upload(batch))
        except BaseException as error:
            self._ready.put(error)  # it is raised where the batch is taken

    def _decode(self, samples: Pass) -> PackedBatch | None:
        if not samples:
            return None
        batch = self._load(samples)
        if self._stream is None:
            return batch
        return replace(batch, **{name: tensor.pin_memory() for name, tensor in tensors_of(batch)})

    def _upload(self, batch: PackedBatch | None) -> _Arrived:
        if self._stream is None or batch is None:
            return _Arrived(batch, None)
        with torch.cuda.stream(self._stream):
            there = replace(
                batch, **{name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors_of(batch)}
            )
            uploaded = torch.cuda.Event()
            uploaded.record()
            return _Arrived(there, uploaded)


def tensors_of(batch: PackedBatch) -> list[tuple[str, Tensor]]:
    """The batch's tensors by the names of their fields."""
    named = ((field.name, getattr(batch, field.name)) for field in fields(batch))
    return [(name, value) for name, value in named if isinstance(value, Tensor)]
