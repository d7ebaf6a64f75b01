"""The embedded doorbell: a claim that the API holds open until there is work. Needs no broker."""

from __future__ import annotations

from aerie_worker.claim import Control
from eagle3_core.jobs.wire import Assignment

WAIT_S = 20.0


class Poll:
    """Claims by long-poll."""

    def __init__(self, control: Control, wait_s: float = WAIT_S) -> None:
        self._control = control
        self._wait_s = wait_s

    def wait(self) -> Assignment | None:
        """A claimed unit, or None after `wait_s` seconds without one."""
        return self._control.claim(self._wait_s)

    def close(self) -> None:
        """Nothing listens between two claims."""
