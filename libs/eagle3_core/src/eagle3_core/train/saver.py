"""Checkpoints written beside the compute: copy first, then go on.

Writing 5 GB (weights and moments of a drafter for an 8B verifier) takes seconds, in which training need not stand
still. The copy is made behind the work already queued, so it holds exactly the step that was asked for: on the GPU
itself where there is room (milliseconds; pinning as much host memory took 3 s), else to the host at once. Bringing it to
the host, hashing, writing and storing happen in a thread, one checkpoint at a time, which leaves the interpreter to the
thread that launches steps (`train.streamed`). What goes wrong there is raised at the next save, or when the run waits for
the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from eagle3_core.train.checkpoint import Checkpoints


class Saver:
    """Saves the checkpoints of one run."""

    def __init__(self, checkpoints: Checkpoints, device: torch.device) -> None:
        self._checkpoints, self._device = checkpoints, device
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(
        self, step: int, tensors: Iterable[tuple[str, Tensor]], cursor: dict[str, Any], done: Callable[[], None]
    ) -> None:
        """Begin to save; `tensors` may change as soon as this returns. `done` is called when it is stored.

        Waits for the save before it, and raises what that one met.
        """
        self.wait()
        copies = {name: self._copy(tensor) for name, tensor in tensors}
        copied = None
        if self._device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()

        def work() -> None:
            try:
                with self._beside(copied):
                    self._checkpoints.save(step, copies, cursor)
                done()
            except BaseException as error:
                self._failure = error  # it is raised in the thread that trains

        self._thread = threading.Thread(target=work, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being saved. Raises what the last save met."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _copy(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cuda" and 2 * tensor.nbytes > torch.cuda.mem_get_info(self._device)[0]:
            return tensor.cpu()
        return tensor.clone()

    @contextmanager
    def _beside(self, copied: torch.cuda.Event | None) -> Generator[None]:
        """What is read from the GPU within the block is read over a stream of its own, once the copies are there."""
        if copied is None:
            yield
            return
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            copied.wait()
            yield
