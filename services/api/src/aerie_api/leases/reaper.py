"""Takes units back from workers that fell silent, on a thread of the API process.

It alone turns silence into a fact. A pass that fails (a full disk, say) is logged and said by `/readyz`, and the next
one tries again: a reaper that ended would strand every unit of a dead worker without a word.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from aerie_api.engines import in_short

logger = logging.getLogger(__name__)


class Reaper:
    """Calls `passes` every `interval_s` seconds, and at every hint, until stopped."""

    def __init__(self, passes: Callable[[], None], interval_s: float) -> None:
        self._passes = passes
        self._interval_s = interval_s
        self._due, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="reaper", daemon=True)
        self.failing: str | None = None
        """What the last pass failed with; null when it went well."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def hint(self) -> None:
        """Something happened that a pass should see: the next one comes at once."""
        self._due.set()

    def stop(self) -> None:
        """End, after the pass under way."""
        self._over = True
        self._due.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._due.wait(self._interval_s)
            self._due.clear()
            if self._over:
                return
            try:
                self._passes()
            except (SQLAlchemyError, OSError) as error:
                self.failing = in_short(error)
                logger.exception("the reaper's pass failed; it tries again in %.1f s", self._interval_s)
            else:
                self.failing = None
