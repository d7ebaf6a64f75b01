"""What a run remembers: where it is, and the sums of which its curves are quotients.

While a step runs its sums are one float64 vector on the device (`packed`), so adding up and reducing over ranks is one
operation each; they become plain numbers only where a person or a checkpoint reads them. Counts stay exact in float64
up to 2^53.

Shapes: K steps of the training-time test.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from pydantic import BaseModel
from torch import Tensor

from eagle3_core.drafter.step import StepCounts

PROGRESS_EVERY_S = 0.5


def packed(numerator: Tensor, denominator: Tensor, counts: StepCounts) -> Tensor:
    """float64 [2 + 2K]: numerator, denominator, hits and tried of one pass."""
    parts = (numerator.detach().reshape(1), denominator.reshape(1), counts.hits_K, counts.tried_K)
    return torch.cat([part.double() for part in parts])


class Sums(BaseModel):
    """Sums of which loss and accuracy are quotients; plain numbers, so that they survive a checkpoint exactly."""

    numerator: float = 0.0
    denominator: float = 0.0
    hits: list[int] = []
    tried: list[int] = []

    @classmethod
    def of(cls, values: Sequence[float]) -> Sums:
        """From the values of a `packed` vector."""
        steps = (len(values) - 2) // 2
        counts = [int(value) for value in values[2:]]
        return cls(numerator=values[0], denominator=values[1], hits=counts[:steps], tried=counts[steps:])

    def add(self, other: Sums) -> None:
        """Add up."""
        self.numerator += other.numerator
        self.denominator += other.denominator
        self.hits = [a + b for a, b in zip(self.hits or [0] * len(other.hits), other.hits, strict=True)]
        self.tried = [a + b for a, b in zip(self.tried or [0] * len(other.tried), other.tried, strict=True)]

    @property
    def loss(self) -> float | None:
        """Mean loss; None before anything was added."""
        return self.numerator / self.denominator if self.denominator else None


class Cursor(BaseModel):
    """Where the run is. `interval` are the sums since the last point of the curves, `epoch_sums` of this epoch."""

    step: int = 0
    epoch: int = 0
    group: int = 0
    """Optimizer steps done in this epoch."""
    tokens: int = 0
    finished: bool = False
    interval: Sums = Sums()
    epoch_sums: Sums = Sums()
    last_epoch_loss: float | None = None
    val_loss: float | None = None


class Clock:
    """Rates since the last report, reported at most twice a second."""

    def __init__(self) -> None:
        self._since, self._steps, self._tokens = time.monotonic(), 0, 0

    def tick(self, tokens: int) -> tuple[float, float] | None:
        """(steps/s, tokens/s) if it is time to report."""
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens
        if (elapsed := time.monotonic() - self._since) < PROGRESS_EVERY_S:
            return None
        rates = self._steps / elapsed, self._tokens / elapsed
        self._since, self._steps, self._tokens = time.monotonic(), 0, 0
        return rates
