"""Sends a request to the store again after a failure that may pass, with random, growing pauses.

Full jitter (a pause drawn between zero and the ceiling), because a fleet that met one 503 together must not meet the next one
together. The adapter, which knows the store's errors, says whether a failure may pass (`Verdict`). A failure that may not is
raised at once, and so is the last one when the tries are used up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from eagle3_core.errors import AerieError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Verdict:
    """What a failure is, in the house's words."""

    error: AerieError
    passing: bool
    """Whether the same request may succeed later."""


@dataclass(frozen=True)
class Retries:
    """How often, and how patiently. The defaults outlast a restart of the store: half a minute in the mean, a minute at most."""

    attempts: int = 10
    base_s: float = 0.2
    """Ceiling of the first pause; it doubles with every further one."""
    longest_s: float = 20.0
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    draw: Callable[[float, float], float] = field(default=random.uniform, repr=False)

    def __call__(self, work: Callable[[], Result], judge: Callable[[Exception], Verdict | None]) -> Result:
        """What `work` returns. Raises the verdict's error; a failure without a verdict is raised as it is."""
        for attempt in range(1, self.attempts + 1):
            try:
                return work()
            except Exception as failure:
                verdict = judge(failure)
                if verdict is None:
                    raise
                if not verdict.passing or attempt == self.attempts:
                    raise verdict.error from failure
            self.sleep(self.draw(0.0, min(self.longest_s, self.base_s * 2 ** (attempt - 1))))
        raise AssertionError("unreachable: the last attempt returns or raises")
