"""How many requests to keep in flight to an engine: as many as make it faster, and fewer when it says no.

An engine batches what it is sent; below some number it idles, above it only queues. Where that number lies depends on
model, machine and prompts, so it is found: double while the rate grows, stay where it did not, halve when the engine
turns requests away, and creep back.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST = 4
GAIN = 1.05
"""A doubled limit is kept when the rate grows by this much at least."""


class Concurrency:
    """The limit on requests in flight, moved by what comes back."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic, *, steady: bool = False) -> None:
        """`most` is never exceeded; `steady` begins with it and leaves it only when the engine turns requests away."""
        self.limit = most if steady else min(FIRST, most)
        self._ceiling, self._clock = most, clock
        self._growing, self._best = not steady, 0.0
        self._begin()

    def _begin(self) -> None:
        self._since, self._answers, self._tokens = self._clock(), 0, 0

    def answered(self, tokens: int) -> None:
        """A request that cost `tokens` was answered. The limit moves once for every window of two limits of answers."""
        self._answers += 1
        self._tokens += tokens
        if self._answers < 2 * self.limit:
            return
        rate = self._tokens / max(self._clock() - self._since, 1e-9)
        if not self._growing:
            self.limit = min(self._ceiling, self.limit + 1)
        elif rate > GAIN * self._best:
            self._best, self._settled = rate, self.limit
            self.limit = min(self._ceiling, 2 * self.limit)
        else:
            self.limit = self._ceiling = self._settled
            self._growing = False
        self._begin()

    def refused(self) -> None:
        """The engine turned a request away."""
        self._growing = False
        self.limit = max(1, self.limit // 2)
        self._begin()
