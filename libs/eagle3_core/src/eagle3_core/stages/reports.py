"""How a running stage is heard: its reports as `ChildMessage` lines on one pipe, from any thread.

Progress is thinned to four lines a second, because a stage may report after every batch and each line ends in a
database row; the newest always goes out, because a bar that stands still at 97 % looks like a hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import IO, Protocol

from eagle3_core.jobs.wire import ChildMessage, LogLine, Metric, Progress

PROGRESS_EVERY_S = 0.25
LOG_TEXT_CHARS = 4000


class Channel:
    """The way out: whole lines, from any thread."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._lock = threading.Lock()

    def send(self, message: ChildMessage) -> None:
        """Write one message. A reader that is gone ends this process: its work is nobody's any more."""
        line = message.model_dump_json(exclude_none=True).encode() + b"\n"
        with self._lock:
            self._out.write(line)
            self._out.flush()


class Sender(Protocol):
    """Takes messages."""

    def send(self, message: ChildMessage) -> None:
        """Write one message."""
        ...


def after(seconds: float, act: Callable[[], None]) -> None:
    """Do `act` in `seconds` seconds, in a thread that keeps nobody from leaving."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


class PipeReporter:
    """A stage's reports as messages. Progress goes out at most four times a second, and the newest always does."""

    def __init__(
        self, channel: Sender, clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] = after,
    ) -> None:  # fmt: skip
        self._channel = channel
        self._clock = clock
        self._later = later
        self._lock = threading.Lock()
        self._quiet_until = float("-inf")
        self._waiting: Progress | None = None
        self._closed = False

    def progress(self, progress: Progress) -> None:
        """Report progress: now, or as soon as a quarter of a second has passed since the last, if no newer comes."""
        with self._lock:
            alone = self._waiting is None
            self._waiting = progress
            wait_s = self._quiet_until - self._clock()
        if wait_s <= 0 or progress.done >= progress.total:
            self.flush()
        elif alone:
            self._later(wait_s, self.flush)

    def flush(self) -> None:
        """Send the progress that waits, if any."""
        with self._lock:
            if self._waiting is not None and not self._closed:
                self._channel.send(ChildMessage(progress=self._waiting))
                self._waiting, self._quiet_until = None, self._clock() + PROGRESS_EVERY_S

    def close(self) -> None:
        """Send what waits; nothing goes out afterwards, so that no report follows the unit's end."""
        self.flush()
        with self._lock:
            self._closed = True

    def metric(self, metric: Metric) -> None:
        """Report a value of a curve."""
        self._channel.send(ChildMessage(metric=metric))

    def log(self, line: LogLine) -> None:
        """Report a line of the log, cut to a length that a database row bears."""
        if len(line.text) > LOG_TEXT_CHARS:
            line = line.model_copy(update={"text": line.text[:LOG_TEXT_CHARS] + " [cut]"})
        self._channel.send(ChildMessage(log=line))
