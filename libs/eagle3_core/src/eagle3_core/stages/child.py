"""The process that runs stages: assignments come in as JSON lines, reports go out as JSON lines.

A stage may crash, leak, print or be killed; in a process of its own it takes nobody along. The process stays up from
unit to unit because its verifier is slow to load, and dies with its worker, so no GPU is held by an orphan.

    stdin    one `Assignment` a line; end of file: exit
    stdout   one `ChildMessage` a line, on a private copy of the descriptor: what libraries print goes to stderr
    SIGTERM  the running stage saves and stops (cause `preempted`), then exit 75 (EX_TEMPFAIL)

Environment: AERIE_STORE (object store URL), AERIE_FILE_ROOTS (folders, separated by `:`), AERIE_SCRATCH (temporary files).
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn, Protocol

from pydantic import ValidationError

from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import StageName
from eagle3_core.jobs.states import Cause
from eagle3_core.jobs.wire import Assignment, ChildMessage, Commit, Failure, LogLine, Metric, Progress
from eagle3_core.objects.location import store_at
from eagle3_core.objects.protocol import ObjectStore
from eagle3_core.stages import registry
from eagle3_core.stages.context import Preempted, StageContext, Warm
from eagle3_core.tether import die_with

EX_TEMPFAIL = 75
PROGRESS_EVERY_S = 0.25
LOG_TEXT_CHARS = 4000
PRELOADED = (
    "torch", "eagle3_core.stages.generate", "eagle3_core.stages.evaluate", "eagle3_core.stages.train",
    "eagle3_core.stages.package", "speculators",
)  # fmt: skip
"""What compute stages import, the soonest needed first. Of 17 s of CPU time, speculators alone takes 6."""

_ROOM: dict[StageName, str] = {
    "canary": "a smaller training.batch_tokens or data.max_seq_len",
    "generate": "a smaller data.regenerate.batch_size",
    "extract": "a smaller data.max_seq_len or data.unit_samples",
    "train": "a smaller training.batch_tokens (raise training.accumulation to keep the batch)",
    "evaluate": "a smaller evaluation.batch_size",
}


class Crashed(AerieError):
    """The stage ended in an error that nobody foresaw."""

    code, status, retryable = "unit.crashed", 500, True


class OutOfMemory(AerieError):
    """The stage needed more memory than the machine or the GPU has."""

    code, status, retryable = "unit.out_of_memory", 507, True


class Garbled(AerieError):
    """The process was fed a line that is no assignment."""

    code, status = "child.protocol", 500


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


class Preload:
    """Imports what compute stages need, in the background, as long as nothing else is to do."""

    def __init__(self, channel: Sender, names: Sequence[str] = PRELOADED) -> None:
        self._channel = channel
        self._names = names
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._load, name="preload", daemon=True)
        self._thread.start()

    def enough(self) -> None:
        """Begin no further import."""
        self._wanted.set()

    def wait(self) -> None:
        """Wait for the end of the import under way: two threads importing one package may each see it half done."""
        self._thread.join()

    def _load(self) -> None:
        for name in self._names:
            if self._wanted.is_set():
                return
            try:
                importlib.import_module(name)
            except ImportError as error:  # the stage that needs it will fail with its own words
                text = f"could not import {name} ahead of time: {error}"
                self._channel.send(ChildMessage(log=LogLine(at=time.time(), level="warning", text=text)))


class Child:
    """Runs unit after unit, keeping what is slow to load."""

    def __init__(
        self,
        channel: Channel,
        store: ObjectStore,
        file_roots: Sequence[Path],
        scratch: Path,
        run: Callable[[StageContext], Commit] = registry.run,
        preload: Preload | None = None,
    ) -> None:
        self._channel = channel
        self._store = store
        self._file_roots = tuple(file_roots)
        self._scratch = scratch
        self._run = run
        self._preload = preload
        self._warm = Warm()
        self._busy = False
        self.stop = threading.Event()

    def on_term(self, _signal: int, _frame: FrameType | None) -> None:
        """Ask the running stage to save and stop; leave at once when there is none."""
        self.stop.set()
        if not self._busy:
            os._exit(EX_TEMPFAIL)

    def serve(self, lines: Iterable[bytes]) -> int:
        """Run what `lines` assign, until they end (0) or this process is asked to stop (75)."""
        self._channel.send(ChildMessage(ready=True))
        for line in lines:
            self._busy = True
            self._channel.send(self.answer(line))
            self._busy = False
            if self.stop.is_set():
                return EX_TEMPFAIL
        return 0

    def answer(self, line: bytes) -> ChildMessage:
        """The commit or the failure of the unit that `line` assigns."""
        reporter = PipeReporter(self._channel)
        try:
            assignment = Assignment.model_validate_json(line)
        except ValidationError as error:
            fields = ", ".join(".".join(map(str, fault["loc"])) for fault in error.errors())
            problem = Garbled(f"not an assignment: {fields}", remedy="run worker and child from one version").problem()
            return ChildMessage(failure=Failure(cause=Cause.FAILED, problem=problem, retryable=False))
        try:
            commit = self._attempt(assignment, reporter)
        except Exception as error:
            reporter.close()
            return ChildMessage(failure=failure_of(error, assignment.stage))
        reporter.close()
        return ChildMessage(commit=commit)

    def _attempt(self, assignment: Assignment, reporter: PipeReporter) -> Commit:
        if self._preload is not None and assignment.stage in registry.COMPUTE:
            self._preload.enough()
            self._preload.wait()
        with tempfile.TemporaryDirectory(prefix="unit-", dir=self._scratch, ignore_cleanup_errors=True) as scratch:
            return self._run(
                StageContext(assignment, self._store, Path(scratch), reporter, self._file_roots, self._warm, self.stop)
            )


def failure_of(error: Exception, stage: StageName) -> Failure:
    """How a unit that ended in `error` is reported: typed where it is known, with its traceback where it is not."""
    if isinstance(error, Preempted):
        return Failure(cause=Cause.PREEMPTED, problem=error.problem(), retryable=True)
    if isinstance(error, AerieError):
        return Failure(cause=Cause.FAILED, problem=error.problem(), retryable=error.retryable)
    lines = "".join(traceback.format_exception(error)).splitlines()
    logs = [LogLine(at=time.time(), level="error", text=text[:LOG_TEXT_CHARS]) for text in lines[-60:]]
    if _is_out_of_memory(error):
        typed: AerieError = OutOfMemory(
            f"{stage} ran out of memory: {error}"[:1000],
            remedy=f"ask for {_ROOM.get(stage, 'less work at once')}, or run it on a machine with more memory",
        )
    else:
        typed = Crashed(
            f"{stage} ended in {type(error).__name__}: {error}"[:1000],
            remedy="the unit's log holds the traceback; the unit is tried again before the job fails",
        )
    return Failure(cause=Cause.FAILED, problem=typed.problem(), retryable=True, logs=logs)


def _is_out_of_memory(error: BaseException) -> bool:
    """Python's, CUDA's (torch.OutOfMemoryError) and the CPU allocator's way of saying it, without importing torch."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "not enough memory" in str(error))
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def private_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Stdin and stdout for the protocol alone; whoever reads 0 now finds nothing, whoever writes 1 writes to stderr."""
    lines, out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return lines, out


def main(
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    run: Callable[[StageContext], Commit] = registry.run,
) -> NoReturn:
    """Serve stdin until it ends. `run` runs one unit."""
    parser = argparse.ArgumentParser(prog="python -m eagle3_core.stages.child", description="Runs units of stages.")
    parser.add_argument("--parent", type=int, help="process id of the worker; this process ends with it")
    parser.add_argument("--preload", action="store_true", help="import what compute stages need while idle")
    options = parser.parse_args(arguments)
    lines, out = private_pipes()
    if options.parent is not None:
        die_with(options.parent)
    faulthandler.enable()
    channel = Channel(out)
    roots = [Path(root) for root in environment.get("AERIE_FILE_ROOTS", "").split(os.pathsep) if root]
    scratch = Path(environment.get("AERIE_SCRATCH") or tempfile.gettempdir())
    scratch.mkdir(parents=True, exist_ok=True)
    preload = Preload(channel) if options.preload else None
    child = Child(channel, store_at(environment["AERIE_STORE"]), roots, scratch, run, preload)
    signal.signal(signal.SIGTERM, child.on_term)
    os._exit(child.serve(lines))  # every message is flushed; waiting for a background import would serve nobody


if __name__ == "__main__":
    main(sys.argv[1:])
