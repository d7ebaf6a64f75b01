"""The worker: claim, supervise, again, until it is asked to stop.

It stops in one of two ways. The first SIGTERM or SIGINT ends claiming and asks the running stage to save; the second
kills. Both exit with 75 (EX_TEMPFAIL): a worker that exits 0 would make its Kubernetes Job look complete.
"""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import threading
import time
from collections.abc import Generator
from types import FrameType

from aerie_worker import metrics
from aerie_worker.children import Inbox
from aerie_worker.claim import Control
from aerie_worker.doorbells import Doorbell
from aerie_worker.ear import Ear
from aerie_worker.executors.local import Local
from aerie_worker.patience import pauses
from aerie_worker.supervise import EX_TEMPFAIL, Attempt, KillAsked, StopAsked
from eagle3_core.jobs.refusals import Unreachable, WorkerSetAside
from eagle3_core.jobs.wire import Assignment

REPORTING_S = 20.0
"""How long a worker that is asked to stop tries to report to an API that is away."""

ASIDE_S = 30.0
"""How often, about, a worker that was set aside asks whether it was readmitted."""

log = logging.getLogger("aerie.worker")


class _LeaveTheDoor(BaseException):
    """Raised by the signal handler to end a claim that is waiting."""


class Worker:
    """One start of one worker."""

    def __init__(self, control: Control, doorbell: Doorbell, executor: Local, inbox: Inbox) -> None:
        self._control = control
        self._doorbell = doorbell
        self._executor = executor
        self._inbox = inbox
        self._asked = 0
        self._asked_at = float("inf")
        self._at_the_door = False
        """Whether a signal must end the claim that is waiting."""
        self._away = False
        """Whether the API did not answer the last claim."""
        self._aside = False
        """Whether the API gave no work since this worker failed too often."""
        self._waits = pauses()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """First signal: stop claiming, let the running stage save. Second: kill."""
        self._asked += 1
        self._asked_at = min(self._asked_at, time.monotonic())
        self._inbox.put((None, StopAsked() if self._asked == 1 else KillAsked()))
        if self._at_the_door:
            self._at_the_door = False
            raise _LeaveTheDoor

    def run(self) -> int:
        """Work until asked to stop; the exit status. Raises Refused when the API does not take this worker."""
        self._executor.warm_up()
        ear = Ear(self._control, lambda wish: self._inbox.put((None, wish)))
        ear.start()
        while not self._asked:
            if (assignment := self._claim()) is not None:
                attempt = Attempt(self._control, self._executor.child_for(assignment), assignment, self._inbox)
                attempt.run(self._pause_to_report)
        ear.close()
        self._executor.close()
        self._doorbell.close()
        return EX_TEMPFAIL

    def _claim(self) -> Assignment | None:
        """A unit to run, or None: there was none, a signal came, or the API is away or has set this worker aside.

        In the last two cases it has waited before it returns. Each is logged when it begins and when it ends.
        """
        try:
            with self._door():
                assignment = self._doorbell.wait() if not self._asked else None
        except _LeaveTheDoor:
            return None
        except Unreachable as error:
            if not self._away:
                log.warning("the API is away, asking again until it is back: %s", error.detail)
            self._away = True
            metrics.AWAY.set(1)
            self._pause(next(self._waits))
            return None
        except WorkerSetAside as error:
            if not self._aside:
                log.error("%s", error.text())
            self._aside = True
            self._pause(ASIDE_S * (0.5 + random.random()))  # noqa: S311 - to spread a fleet
            return None
        if self._aside:
            log.info("readmitted")
        if self._away:
            log.info("the API is back")
        self._aside, self._away, self._waits = False, False, pauses()
        metrics.AWAY.set(0)
        return assignment

    @contextlib.contextmanager
    def _door(self) -> Generator[None]:
        self._at_the_door = True
        try:
            yield
        finally:
            self._at_the_door = False

    def _pause(self, seconds: float) -> None:
        """Wait, but not beyond a signal."""
        with contextlib.suppress(_LeaveTheDoor), self._door():
            if not self._asked:
                threading.Event().wait(seconds)

    def _pause_to_report(self, seconds: float) -> bool:
        """Wait between two tries to report; whether to give up, as a worker that must leave does after 20 s."""
        threading.Event().wait(seconds)
        return self._asked > 1 or time.monotonic() - self._asked_at > REPORTING_S

    def install(self) -> None:
        """Take the process's SIGTERM and SIGINT."""
        signal.signal(signal.SIGTERM, self.on_signal)
        signal.signal(signal.SIGINT, self.on_signal)
