"""The process that runs stages: assignments come in as JSON lines, reports go out as JSON lines.

A stage may crash, leak, print or be killed; in a process of its own it takes nobody along. The process stays up from
unit to unit because its verifier is slow to load, and dies with its worker, so no GPU is held by an orphan.

    stdin    one `Assignment` a line; end of file: exit
    stdout   one `ChildMessage` a line, on a private copy of the descriptor: what libraries print goes to stderr
    SIGTERM  the running stage saves and stops (cause `preempted`), then exit 75 (EX_TEMPFAIL)

Environment: AERIE_STORE (object store URL), AERIE_FILE_ROOTS (folders, separated by `:`), AERIE_SCRATCH (temporary files), OTEL_* (where
spans go, see `telemetry.traces`).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from pydantic import ValidationError

from eagle3_core.data.sources import roots_of
from eagle3_core.errors import AerieError
from eagle3_core.jobs.states import Cause
from eagle3_core.jobs.wire import Assignment, ChildMessage, Commit, Failure
from eagle3_core.objects.location import store_at
from eagle3_core.objects.protocol import ObjectStore
from eagle3_core.stages import registry
from eagle3_core.stages.context import StageContext, Warm
from eagle3_core.stages.failures import failure_of
from eagle3_core.stages.preload import Preload
from eagle3_core.stages.reports import Channel, PipeReporter
from eagle3_core.telemetry import traces
from eagle3_core.tether import die_with

EX_TEMPFAIL = 75


class Garbled(AerieError):
    """The process was fed a line that is no assignment."""

    code, status = "child.protocol", 500


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
        try:
            for line in lines:
                self._busy = True
                self._channel.send(self.answer(line))
                self._busy = False
                if self.stop.is_set():
                    return EX_TEMPFAIL
            return 0
        finally:
            self._warm.release()

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
            with traces.span(f"run {assignment.stage}", assignment.traceparent, "consumer", job=assignment.job_id,
                             stage=assignment.stage, unit=assignment.unit.index, attempt=assignment.attempt):  # fmt: skip
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
            roots = roots_of(assignment.tenant, self._file_roots)
            return self._run(
                StageContext(assignment, self._store, Path(scratch), reporter, roots, self._warm, self.stop)
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
    traces.configure("aerie-child", environment)
    channel = Channel(out)
    roots = [Path(root) for root in environment.get("AERIE_FILE_ROOTS", "").split(os.pathsep) if root]
    scratch = Path(environment.get("AERIE_SCRATCH") or tempfile.gettempdir())
    scratch.mkdir(parents=True, exist_ok=True)
    preload = Preload(channel) if options.preload else None
    child = Child(channel, store_at(environment["AERIE_STORE"]), roots, scratch, run, preload)
    signal.signal(signal.SIGTERM, child.on_term)
    status = child.serve(lines)
    traces.close()
    os._exit(status)  # every message is flushed; waiting for a background import would serve nobody


if __name__ == "__main__":
    main(sys.argv[1:])
