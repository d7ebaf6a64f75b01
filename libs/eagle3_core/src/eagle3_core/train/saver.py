"""Checkpoints written beside the compute: copy first, then go on.

Writing 5 GB (weights and moments of a drafter for an 8B verifier) takes seconds, in which training need not stand
still. The copy is made behind the work already queued, so it holds exactly the step that was asked for; hashing,
writing and storing happen in a thread, one checkpoint at a time. What goes wrong there is raised at the next save, or
when the run waits for the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from eagle3_core.train.checkpoint import Checkpoints


class Saver:
    """Saves the checkpoints of one run."""

    def __init__(self, checkpoints: Checkpoints, device: torch.device) -> None:
        self._checkpoints, self._device = checkpoints, device
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(
        self, step: int, tensors: Iterable[tuple[str, Tensor]], cursor: dict[str, Any], done: Callable[[], None]
    ) -> None:
        """Begin to save; `tensors` may change as soon as this returns. `done` is called when it is stored.

        Waits for the save before it, and raises what that one met.
        """
        self.wait()
        copies = {name: self._copy(name, tensor) for name, tensor in tensors}
        copied = None
        if self._device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()

        def work() -> None:
            try:
                if copied is not None:
                    copied.synchronize()
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

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor` in a host buffer that is kept for the next time: pinned, so that the copy needs no waiting."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._device.type == "cuda"
            )
        return self._buffers[name].copy_(tensor, non_blocking=True)
