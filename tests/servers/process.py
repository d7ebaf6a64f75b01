"""A server process that a test owns: started on a free loopback port, ready when it answers, stopped with its group.

`kill` and `start` again give the chaos tests what an operator fears: the same port, the same data, a moment of nothing
in between. What the process says goes to a log file whose end is part of every failure.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PATIENCE_S = 60.0
LOG_TAIL_BYTES = 4000


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """One server: `command` run in a process group of its own, `ready()` true once it answers."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        ready: Callable[[], bool],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._command, self._log, self._ready = name, list(command), log, ready
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process's id, while it runs."""
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers. Raises AssertionError with the end of its log."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=self._env, start_new_session=True
            )
        tick = threading.Event()
        for _ in range(int(PATIENCE_S / 0.05)):
            if self._process.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self._process.returncode}: {self._tail()}")
            if self._ready():
                return
            tick.wait(0.05)
        self.kill()
        raise AssertionError(f"{self.name} did not answer within {PATIENCE_S:.0f} s: {self._tail()}")

    def stop(self) -> None:
        """Ask it to end, and wait until it has."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a power cut would."""
        self._end(signal.SIGKILL)

    def restart(self, *, hard: bool = True) -> None:
        """End it and start it again on the same port and data."""
        (self.kill if hard else self.stop)()
        self.start()

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, how)
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _tail(self) -> str:
        return self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
