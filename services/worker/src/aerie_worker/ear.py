"""Hears at once that a unit is to stop, instead of with its next heartbeat.

One thread for the life of the worker stays on the line with the API (a long poll), whatever the worker is at. The
heartbeats carry the same wishes, so an ear that hears nothing makes a stop up to ten seconds slower and no more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from aerie_worker.claim import Control, Refused
from aerie_worker.patience import pauses
from aerie_worker.pulse import wish_of
from eagle3_core.jobs.refusals import Unreachable

LISTEN_S = 20.0
PAUSE_S = 0.25
"""Between two questions, so that an API that answers at once (because it is stopping) is not flooded."""
MOST_KNOWN = 64
"""Units whose stops are remembered, as many as one question may name; a worker holds one at a time."""
log = logging.getLogger("aerie.worker")


class Ear:
    """Passes wishes on by `emit`, one for each attempt."""

    def __init__(self, control: Control, emit: Callable[[object], None]) -> None:
        self._control = control
        self._emit = emit
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="ear", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """Listen no more; a call that is still on the line is left to itself."""
        self._closed.set()

    def _listen(self) -> None:
        known: dict[str, int] = {}
        waits = pauses()
        while not self._closed.is_set():
            try:
                told = self._control.stops(known, LISTEN_S)
            except Unreachable:
                self._closed.wait(next(waits))
                continue
            except Refused as error:
                log.warning("stops are heard with the heartbeats only: %s", error.text())
                return
            waits = pauses()
            for unit_run_id, stop in told.items():
                if (wish := wish_of(unit_run_id, stop.fence, stop)) is not None:
                    self._emit(wish)
                known.pop(unit_run_id, None)  # the latest told is the last to be forgotten
                known[unit_run_id] = stop.fence
            for unit_run_id in list(known)[:-MOST_KNOWN]:
                del known[unit_run_id]
            self._closed.wait(PAUSE_S)
