"""Numbers that the device computed, read without ever making it wait.

`float(tensor)` on a GPU stops the host until all queued work is done, and then the GPU until the host has queued more:
3 to 10 % of a step. So a value is copied into pinned memory behind the work that makes it, and read when the next
step's work is queued already. On a CPU there is nothing to wait for, and values are read at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Act = Callable[[list[float]], None]


@dataclass(frozen=True)
class _Copy:
    """Values on their way to the host."""

    host_N: Tensor
    arrived: torch.cuda.Event
    act: Act


class Readback:
    """Values to be read later, in the order in which they were asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: deque[_Copy] = deque()

    def later(self, values_N: Tensor, act: Act) -> None:
        """Call `act` with the values, a list of numbers: now on a CPU, in a `settle` to come on a GPU."""
        if self._device.type == "cpu":
            act(values_N.tolist())
            return
        host_N = torch.empty(values_N.shape, dtype=values_N.dtype, pin_memory=True)
        host_N.copy_(values_N, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._waiting.append(_Copy(host_N, arrived, act))

    def settle(self, but: int = 0) -> None:
        """Act on all values but the newest `but`, waiting for them. What an act raises ends the run."""
        while len(self._waiting) > but:
            copy = self._waiting.popleft()
            copy.arrived.synchronize()
            copy.act(copy.host_N.tolist())
