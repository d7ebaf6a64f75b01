"""The heartbeat of one attempt: six times a lease (every 10 s), sooner when there is news, at most once a second.

It runs beside the supervisor, so that an API that answers slowly never delays reading the child. What could not be
delivered is kept and goes with the next beat, within bounds: of a flood the oldest lines go first, and that is said.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass

from aerie_worker.claim import Control, Refused
from aerie_worker.patience import pauses
from eagle3_core.jobs.refusals import LeaseLost, Unreachable
from eagle3_core.jobs.wire import Assignment, Heartbeat, HeartbeatAnswer, LogLine, Metric, Progress

NEWS_EVERY_S = 1.0
BEATS = 6
"""Signs of life that fit into one lease: five may be lost."""
MOST_LINES, MOST_METRICS = 400, 4000

log = logging.getLogger("aerie.worker")


@dataclass(frozen=True)
class Wish:
    """What the API wants of one attempt. It may arrive when the attempt is over, and says nothing to the unit's next one."""

    unit_run_id: str
    fence: int

    def concerns(self, attempt: Assignment) -> bool:
        """Whether `attempt` is the one that is meant."""
        return (self.unit_run_id, self.fence) == (attempt.unit_run_id, attempt.fence)


class CancelAsked(Wish):
    """A person wants the unit to stop."""


class GiveBackAsked(Wish):
    """The job is paused: what the unit has is to be saved for later."""


class LeaseGone(Wish):
    """Another attempt owns the unit."""


def wish_of(unit_run_id: str, fence: int, answer: HeartbeatAnswer) -> CancelAsked | GiveBackAsked | None:
    """What `answer` asks of the unit's holder, whose attempt has `fence`."""
    if answer.cancel:
        return CancelAsked(unit_run_id, fence)
    return GiveBackAsked(unit_run_id, fence) if answer.give_back else None


class News:
    """What the API has not heard yet. Not thread-safe by itself."""

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self.metrics: deque[Metric] = deque(maxlen=MOST_METRICS)
        self.lines: deque[LogLine] = deque(maxlen=MOST_LINES)
        self._dropped = 0

    def __bool__(self) -> bool:
        return bool(self.progress or self.metrics or self.lines)

    def add_line(self, line: LogLine) -> None:
        """Keep a line; of too many, the newest."""
        self._dropped += len(self.lines) == MOST_LINES
        self.lines.append(line)

    def take(self) -> Heartbeat:
        """Everything, as one heartbeat; nothing stays."""
        lines = list(self.lines)
        if self._dropped:
            lines.insert(0, LogLine(at=lines[0].at, level="warning", text=f"{self._dropped} lines left out here"))
        beat = Heartbeat(progress=self.progress, metrics=list(self.metrics), logs=lines)
        self.progress, self._dropped = None, 0
        self.metrics.clear()
        self.lines.clear()
        return beat

    def put_back(self, beat: Heartbeat) -> None:
        """Undo `take`: `beat` was not delivered."""
        self.progress = self.progress or beat.progress
        self.metrics.extendleft(reversed(beat.metrics[: MOST_METRICS - len(self.metrics)]))
        for line in reversed(beat.logs[-(MOST_LINES - len(self.lines)) :] if len(self.lines) < MOST_LINES else []):
            self.lines.appendleft(line)


class Pulse:
    """Beats in a thread of its own from `start` to `stop`; tells by `emit` what the API wants."""

    def __init__(self, control: Control, assignment: Assignment, emit: Callable[[object], None]) -> None:
        self._control = control
        self._assignment = assignment
        self._emit = emit
        self._every_s = assignment.lease_s / BEATS
        self._news = News()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=copy_context().run, args=(self._beat,), name="pulse", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> Heartbeat:
        """End the beating; what was not told yet is returned, for the attempt's last word."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        return self._news.take()

    def progress(self, progress: Progress) -> None:
        """Tell the newest progress."""
        with self._changed:
            self._news.progress = progress
            self._changed.notify()

    def metric(self, metric: Metric) -> None:
        """Tell a value."""
        with self._changed:
            self._news.metrics.append(metric)
            self._changed.notify()

    def line(self, line: LogLine) -> None:
        """Tell a line of the log."""
        with self._changed:
            self._news.add_line(line)
            self._changed.notify()

    def _beat(self) -> None:
        unit_run_id, fence = self._assignment.unit_run_id, self._assignment.fence
        last, quiet_until, waits = time.monotonic(), 0.0, pauses()
        while (beat := self._next(last, quiet_until)) is not None:
            last = time.monotonic()
            quiet_until = last + NEWS_EVERY_S
            try:
                answer = self._control.heartbeat(self._assignment, beat)
                if (wish := wish_of(unit_run_id, fence, answer)) is not None:
                    self._emit(wish)
                waits = pauses()
            except LeaseLost:
                self._emit(LeaseGone(unit_run_id, fence))
                return
            except Unreachable:
                quiet_until = last + next(waits)
                with self._changed:
                    self._news.put_back(beat)
            except Refused as error:
                log.error("heartbeat of %s refused, its news is lost: %s", unit_run_id, error.text())

    def _next(self, last: float, quiet_until: float) -> Heartbeat | None:
        """What to send when it is time to send; None at the end."""
        with self._changed:
            while not self._stopped:
                due = quiet_until if self._news else max(last + self._every_s, quiet_until)
                if (wait_s := due - time.monotonic()) <= 0:
                    return self._news.take()
                self._changed.wait(wait_s)
            return None
