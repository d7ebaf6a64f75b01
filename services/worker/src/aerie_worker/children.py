"""A child process as the worker sees it: a place to hand assignments to, and a stream of events.

It leads a process group of its own, so that a terminal's Ctrl-C does not reach it and one signal ends it with all it
started. It is killed while it is still a zombie, when its id cannot yet belong to anyone else. Everything that happens
(a message, a line on stderr, its end) arrives in one queue, the end last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any
from urllib.parse import quote

from pydantic import ValidationError

from eagle3_core.jobs.wire import Assignment, ChildMessage

LINE_CHARS = 2000


@dataclass(frozen=True)
class StderrLine:
    """A line that the child or a library in it wrote to stderr or stdout."""

    text: str


@dataclass(frozen=True)
class Exited:
    """The child ended; `code` is its exit status, negative for a signal."""

    code: int


Inbox = SimpleQueue[tuple[Any, Any]]
"""Events as (source, event): the source is the child they concern, or None."""


def stage_child(preload: bool) -> list[str]:
    """The command line of a child that runs stages."""
    command = [sys.executable, "-m", "eagle3_core.stages.child", "--parent", str(os.getpid())]
    return [*command, "--preload"] if preload else command


class ChildProcess:
    """A running child. Start it from the main thread: the kernel ties it to the thread that does."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], scratch: Path, inbox: Inbox) -> None:
        """`scratch` is the child's own folder, removed after its end."""
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._scratch = scratch
        self.desk = None if environment.get("AERIE_STORE") else scratch / "objects.sock"
        """Where it asks for objects, if it has no key to their store (`aerie_worker.lending`)."""
        lent = {"AERIE_STORE": f"lent://{quote(str(self.desk.absolute()))}"} if self.desk else {}
        self._inbox = inbox
        self._process = subprocess.Popen(  # noqa: S603 - the command is ours
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0,
            env={**environment, **lent, "AERIE_SCRATCH": str(scratch)},
        )  # fmt: skip
        self.pid = self._process.pid
        self.spent = False
        """Whether it must not get another unit."""
        self._errors = threading.Thread(target=self._read_errors, name=f"stderr-{self.pid}", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"child-{self.pid}", daemon=True)
        self._errors.start()
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether the child has not ended yet."""
        return self._reader.is_alive()

    def give(self, assignment: Assignment) -> None:
        """Hand over a unit, without the attempt's token. A child that is gone says so by its `Exited` event."""
        line = assignment.model_copy(update={"token": ""}).model_dump_json().encode() + b"\n"
        with contextlib.suppress(BrokenPipeError, ValueError):  # closed by its end, or by our closing it
            self._pipe(self._process.stdin).write(line)
            self._pipe(self._process.stdin).flush()

    def ask_to_stop(self) -> None:
        """Ask the running stage to save and stop, and the child to end."""
        self.spent = True
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the child and everything in its process group, now, and wait until it is gone."""
        self.spent = True
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._reader.join()

    def dismiss(self) -> None:
        """Let an idle child go: the end of its input ends it; what does not end within two seconds is killed."""
        self.spent = True
        with contextlib.suppress(BrokenPipeError):
            self._pipe(self._process.stdin).close()
        self._reader.join(2)
        self.kill()

    def _read(self) -> None:
        for line in self._pipe(self._process.stdout):
            try:
                event: object = ChildMessage.model_validate_json(line)
            except ValidationError:
                event = StderrLine(f"not a message: {line[:200]!r}")
            self._inbox.put((self, event))
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing left in the group
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self._errors.join()
        self._pipe(self._process.stdout).close()
        with contextlib.suppress(BrokenPipeError):
            self._pipe(self._process.stdin).close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._inbox.put((self, Exited(code)))

    def _read_errors(self) -> None:
        with self._pipe(self._process.stderr) as pipe:
            for raw in pipe:
                for text in raw.decode(errors="replace").splitlines():  # progress bars separate by carriage returns
                    if text.strip():
                        self._inbox.put((self, StderrLine(text[:LINE_CHARS])))

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe
