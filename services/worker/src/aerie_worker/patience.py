"""How long a worker waits for an API that is away: for ever, with growing pauses.

The API may be away for a minute or a night, and a worker keeps what it has meanwhile. The pauses are spread at random, so
that a fleet does not return in one instant.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TypeVar

from eagle3_core.jobs.refusals import Unreachable

Answer = TypeVar("Answer")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0


def pauses(spread: Callable[[], float] = random.random) -> Iterator[float]:
    """Seconds to wait before each further try: doubling from 0.25 to 10, each between half and one and a half of that."""
    pause = FIRST_PAUSE_S
    while True:
        yield pause * (0.5 + spread())
        pause = min(2 * pause, LONGEST_PAUSE_S)


def insist(call: Callable[[], Answer], pause: Callable[[float], bool]) -> Answer:
    """`call()`, again and again while the API is away. `pause(seconds)` waits and says whether to give up (then Unreachable)."""
    for seconds in pauses():
        try:
            return call()
        except Unreachable:
            if pause(seconds):
                raise
    raise AssertionError("pauses never end")
