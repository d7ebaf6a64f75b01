"""One attempt at one unit: feed the child, keep the lease, bring back a commit or a failure.

Everything that can happen is an event in one queue (a message of the child, its end, the API's wish, a signal to the
worker), so the order of events is the order of decisions and nothing waits for two things at once. An API that is away
stops nothing: the child computes on, and the fence decides at the commit whether the work still counts.

    cancelled    SIGTERM, 25 s to save, then SIGKILL to the whole process group
    preempted    (or the job was paused) the same, but what finishes in time is committed
    lease lost   SIGKILL at once, nothing is uploaded: the unit is another worker's
"""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Any

from aerie_worker import metrics
from aerie_worker.children import ChildProcess, Exited, Inbox, StderrLine
from aerie_worker.claim import Control, Refused
from aerie_worker.lending import lending
from aerie_worker.patience import insist
from aerie_worker.pulse import CancelAsked, GiveBackAsked, LeaseGone, Pulse, Wish
from eagle3_core.errors import AerieError
from eagle3_core.jobs.refusals import LeaseLost, Preempted, Unreachable
from eagle3_core.jobs.states import Cause
from eagle3_core.jobs.wire import Assignment, ChildMessage, Commit, Failure, LogLine
from eagle3_core.telemetry import logs, traces

EX_TEMPFAIL = 75
GRACE_S = 25.0
LAST_LINES = 20
TAINTING = ("unit.crashed", "unit.out_of_memory", "unit.preempted")
"""Failures after which the child gets no further unit: its memory is not to be trusted, or it is about to end."""

log = logging.getLogger("aerie.worker")
child_log = logging.getLogger("aerie.child")


class ChildDied(AerieError):
    """The process that ran the unit ended without an answer."""

    code, status, retryable = "unit.child_died", 500, True


class Cancelled(AerieError):
    """A person cancelled the job."""

    code, status = "unit.cancelled", 409


class StopAsked:
    """The worker got SIGTERM or SIGINT."""


class KillAsked:
    """The worker got it a second time."""


class Attempt:
    """Supervises one unit in `child`; `inbox` is where the child's events and the worker's signals arrive."""

    def __init__(
        self, control: Control, child: ChildProcess, assignment: Assignment, inbox: Inbox, grace_s: float = GRACE_S
    ) -> None:
        self._control = control
        self._child = child
        self._unit = assignment
        self._inbox = inbox
        self._grace_s = grace_s
        self._why: Cause | None = None
        self._kill_at = float("inf")
        self._last_words: deque[str] = deque(maxlen=LAST_LINES)

    def run(self, pause: Callable[[float], bool]) -> None:
        """Run the unit and report its end. `pause(seconds)` waits between tries to report, and says when to give up."""
        unit = self._unit
        about: dict[str, Any] = {
            "job": unit.job_id,
            "stage": unit.stage,
            "unit": unit.unit.index,
            "attempt": unit.attempt,
        }
        with (
            logs.about(tenant=unit.tenant, **about),
            traces.span(f"unit {unit.stage}", unit.traceparent, **about) as span,
        ):
            self._pulse = Pulse(self._control, unit, lambda event: self._inbox.put((None, event)))
            self._run(pause, span)

    def _run(self, pause: Callable[[float], bool], span: traces.Span) -> None:
        started = time.monotonic()
        with lending(self._control, self._unit, self._child.desk):
            self._child.give(self._unit.model_copy(update={"traceparent": traces.current()}))
            self._pulse.start()
            try:
                end = self._watch()
            finally:
                untold = self._pulse.stop()
        if end is None:
            log.warning("%s: lease lost, everything it made is dropped", self._name)
            span.fail("lease lost")
            return metrics.unit_ended(self._unit.stage, "lease_lost", time.monotonic() - started)
        end.logs[:0] = untold.logs
        if isinstance(end, Commit):
            end.metrics[:0] = untold.metrics
        if isinstance(end, Failure):
            span.fail(f"{end.cause.value}: {end.problem.get('code')}")
        self._report(end, pause, seconds := time.monotonic() - started)
        outcome = "committed" if isinstance(end, Commit) else end.cause.value
        return metrics.unit_ended(self._unit.stage, outcome, seconds)

    @property
    def _name(self) -> str:
        unit = self._unit
        return f"{unit.job_id} {unit.stage} {unit.unit.index + 1}/{unit.unit.of} attempt {unit.attempt}"

    def _watch(self) -> Commit | Failure | None:
        """The unit's end, or None when the lease is lost."""
        while True:
            wait_s = self._kill_at - time.monotonic()
            try:
                source, event = self._inbox.get(timeout=max(0.0, wait_s) if wait_s < float("inf") else None)
            except Empty:
                log.warning("%s: still there after %.0f s, killing its process group", self._name, self._grace_s)
                self._kill()
                continue
            if source is not None and source is not self._child:
                continue  # the last words of an earlier child
            if isinstance(event, Wish) and not event.concerns(self._unit):
                continue  # meant an earlier attempt, which may have been one at this unit
            match event:
                case Exited():
                    return self._ended(event.code)
                case ChildMessage():
                    if (end := self._heard(event)) is not None:
                        return end
                case StderrLine():
                    child_log.info("%s", event.text)
                    self._last_words.append(event.text)
                    self._pulse.line(LogLine(at=time.time(), text=event.text))
                case LeaseGone():
                    self._kill()
                    return None
                case CancelAsked():
                    self._ask_to_stop(Cause.CANCELLED)
                case GiveBackAsked() | StopAsked():
                    self._ask_to_stop(Cause.PREEMPTED)
                case _:  # KillAsked
                    self._why = self._why or Cause.PREEMPTED
                    self._kill()

    def _heard(self, message: ChildMessage) -> Commit | Failure | None:
        """Pass on news; return the end of the unit if the message is it."""
        if message.progress is not None:
            self._pulse.progress(message.progress)
            metrics.progressed(self._unit.stage, message.progress)
        if message.metric is not None:
            self._pulse.metric(message.metric)
        if message.log is not None:
            self._pulse.line(message.log)
            child_log.log(logging.getLevelNamesMapping()[message.log.level.upper()], "%s", message.log.text)
        if self._why is Cause.CANCELLED:
            return None  # whatever it says now, its end counts
        if message.failure is not None and self._why is Cause.PREEMPTED:
            return self._because_asked()
        if message.failure is not None and message.failure.problem.get("code") in TAINTING:
            self._child.spent = True
        return message.commit or message.failure

    def _ended(self, code: int) -> Failure:
        """The child is gone before it answered."""
        self._child.spent = True
        if self._why is not None:
            return self._because_asked()
        if code == EX_TEMPFAIL:
            problem = Preempted(
                "its process was asked to stop", remedy="none needed: the unit is queued again"
            ).problem()
            return Failure(cause=Cause.PREEMPTED, problem=problem)
        died = ChildDied(
            f"the process of {self._unit.stage} {_how(code)}" + (f"; its last line: {self._last_words[-1]}" if self._last_words else ""),
            remedy="the kernel kills what takes too much memory: look at dmesg, and give the unit less or the machine more"
            if code == -signal.SIGKILL
            else "the unit's log holds its last lines; the unit is tried again before the job fails",
            exit_status=code,
            last_lines=list(self._last_words),
        )  # fmt: skip
        # Whoever sends these signals (a person, the kernel, a node that drains) says nothing about the unit's own fault.
        lost = code in (-signal.SIGKILL, -signal.SIGTERM)
        return Failure(cause=Cause.WORKER_LOST if lost else Cause.FAILED, problem=died.problem(), retryable=True)

    def _because_asked(self) -> Failure:
        if self._why is Cause.CANCELLED:
            told = Cancelled(
                "the job was cancelled", remedy="none needed; `aerie retry JOB` goes on from what is saved"
            )
            return Failure(cause=Cause.CANCELLED, problem=told.problem(), retryable=False)
        problem = Preempted("the worker was asked to stop", remedy="none needed: the unit is queued again").problem()
        return Failure(cause=Cause.PREEMPTED, problem=problem)

    def _ask_to_stop(self, why: Cause) -> None:
        if self._why is None:
            log.info("%s: %s, asking it to save and stop", self._name, why.value)
            self._child.ask_to_stop()
            self._kill_at = time.monotonic() + self._grace_s
            self._why = why

    def _kill(self) -> None:
        self._kill_at = float("inf")
        self._child.kill()

    def _report(self, end: Commit | Failure, pause: Callable[[float], bool], seconds: float) -> None:
        """Tell the API how the unit ended, as often as it takes."""
        try:
            if isinstance(end, Commit):
                insist(lambda: self._control.commit(self._unit, end), pause)
                log.info("%s: committed after %.1f s", self._name, seconds)
            else:
                insist(lambda: self._control.fail(self._unit, end), pause)
                log.warning("%s: %s %s", self._name, end.cause.value, end.problem.get("detail", ""))
        except LeaseLost as lost:
            log.warning("%s: dropped, %s", self._name, lost.text())
        except Unreachable as away:
            log.error("%s: its end stays unreported, its lease will expire: %s", self._name, away.text())
        except Refused as refused:
            log.error("%s: the API does not take its end: %s", self._name, refused.text())
            if isinstance(end, Commit):
                self._report(Failure(cause=Cause.FAILED, problem=refused.problem(), retryable=False), pause, seconds)


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
