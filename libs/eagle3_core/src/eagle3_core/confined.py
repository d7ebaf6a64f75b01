"""Runs work on untrusted input in a process of its own, with bounded memory and time.

A checkpoint's chat template is a program, its tokenizer brings regular expressions, and both reach C and Rust code that no
signal interrupts. Whatever such a process does, the caller gets an answer, or within the limits an error that there is none;
then the process is gone, and the next request starts a new one. Otherwise it stays up between requests, since its imports
cost more than most answers.

    with Confined("eagle3_core.jobs.preflight:confined", Limits(cpu_s=30, wall_s=50, memory_bytes=4 << 30)) as process:
        answer = process.ask({"spec": ...})

A service is a function of the request (JSON) and of `say`, which notes what is being looked at; it returns JSON. AerieErrors
that it raises are raised in the caller. On the socket pair a message is its length (4 bytes, little-endian) and its JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from eagle3_core.errors import AerieError


class Say(Protocol):
    """Notes what a service looks at from now on."""

    def __call__(self, what: str, pointer: str | None, /, cpu_s: float | None = None) -> None:
        """`what`, in words, comes from the job's field `pointer`; it may take `cpu_s` of CPU time (None: all that is left)."""
        ...


Service = Callable[[Any, Say], Any]

ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
"""A bound on CPU time means little where every core spends it."""
PASSED_ON = (
    "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "PYTHONPATH",
    "PYTHONWARNINGS", "TMPDIR", "VIRTUAL_ENV",
)  # fmt: skip
"""What a process gets of the environment: no token, password or address of ours."""
MAX_TRACEBACK = 8000
START_S = 300.0
"""How long a process may take to start: 1 s mostly, more on a machine that is busy."""
GRACE_S = 5.0
"""How long a process may take to end after its socket was closed."""


@dataclass(frozen=True)
class Limits:
    """What one question may cost."""

    cpu_s: float
    """CPU time; the kernel ends the process there."""
    wall_s: float
    """Time; more than `cpu_s`, since files may be slow and the machine busy."""
    memory_bytes: int
    """Address space beyond what the process has when it starts."""


class Unanswered(Exception):
    """The process did not answer: `why` says which limit it met, `at` and `pointer` what it was looking at."""

    def __init__(self, why: str, at: str, pointer: str | None, *, in_time: bool = False, fresh: bool = False) -> None:
        """`in_time`: a limit of time was met; `fresh`: the process had answered nothing before."""
        super().__init__(f"{at}: {why}")
        self.why, self.at, self.pointer, self.in_time, self.fresh = why, at, pointer, in_time, fresh


class ServiceFailed(Exception):
    """The service itself is at fault: what it raised, with its traceback."""


class Confined:
    """One process that answers one question after another. Not for several threads at once."""

    def __init__(self, service: str, limits: Limits) -> None:
        """`service` is `module:function`. The process starts with the first question."""
        self._service = service
        self._limits = limits
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._fresh = True
        """Whether the process has answered nothing yet."""

    def __enter__(self) -> Confined:
        """Itself; the process ends with the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self.close()

    def ask(self, request: Any) -> Any:
        """The service's answer. Raises Unanswered, the AerieError that the service raised, and ServiceFailed.

        A process that had answered before may have died of what came before: then a fresh one is asked once more.
        """
        try:
            return self._ask(request)
        except Unanswered as error:
            if error.fresh or error.in_time:
                raise
            return self._ask(request)

    def _ask(self, request: Any) -> Any:
        at, pointer, within = "the beginning", None, self._limits.cpu_s
        try:
            channel, fresh = self._channel(), self._fresh
            end = time.monotonic() + self._limits.wall_s
            channel.settimeout(self._limits.wall_s)
            _send(channel, request)
            while "at" in (message := _receive(channel, end)):
                at, pointer, within = message["at"]
        except TimeoutError:
            self.close()
            raise Unanswered(f"no answer within {self._limits.wall_s:g} s", at, pointer, in_time=True) from None
        except (OSError, EOFError):
            fresh, status = self._fresh, self._end()
            if status == -signal.SIGPROF:
                raise Unanswered(f"more than {within:.3g} s of CPU time", at, pointer, in_time=True) from None
            why = f"its process ended with status {status}; most likely it needed more than {self._limits.memory_bytes >> 20} MiB"
            raise Unanswered(why, at, pointer, fresh=fresh) from None
        except BaseException:  # its answer may still come, and must not be taken for the next one's
            self.close()
            raise
        self._fresh = False
        if "problem" in message:
            raise AerieError.from_problem(message["problem"])
        if "failed" in message:
            raise ServiceFailed(message["failed"])
        if "crash" in message:
            self.close()
            raise Unanswered(message["crash"], at, pointer, fresh=fresh)
        return message["answer"]

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _channel(self) -> socket.socket:
        if self._socket is None:
            ours, theirs = socket.socketpair()
            limits = [str(self._limits.cpu_s), str(self._limits.memory_bytes)]
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - this very interpreter and module
                    [sys.executable, "-m", "eagle3_core.confined", self._service, str(theirs.fileno()), *limits],
                    pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                    env={**{name: os.environ[name] for name in PASSED_ON if name in os.environ}, **ONE_THREAD},
                )  # fmt: skip
            self._socket, self._fresh = ours, True
            try:
                _receive(ours, time.monotonic() + START_S)  # its imports are on nobody's account
            except (OSError, EOFError) as error:
                raise ServiceFailed(f"{self._service} did not start: {error or 'its process ended'}") from error
        return self._socket

    def _end(self) -> int | None:
        """The status with which the process has ended; it is cleared away."""
        status: int | None = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                status = self._process.wait(GRACE_S)
        self.close()
        return status


def _send(channel: socket.socket, message: Any) -> None:
    body = json.dumps(message).encode()
    channel.sendall(len(body).to_bytes(4, "little") + body)


def _receive(channel: socket.socket, end: float | None = None) -> Any:
    """The next message. Raises EOFError at the end, TimeoutError when the clock shows `end`."""
    return json.loads(_read(channel, int.from_bytes(_read(channel, 4, end), "little"), end))


def _read(channel: socket.socket, length: int, end: float | None) -> bytes:
    data = bytearray()
    while len(data) < length:
        if end is not None:
            channel.settimeout(max(1e-3, end - time.monotonic()))
        if not (piece := channel.recv(min(length - len(data), 1 << 20))):
            raise EOFError
        data += piece
    return bytes(data)


# -- inside the process


def _answer(service: Service, request: Any, say: Say) -> dict[str, Any]:
    try:
        answer = {"answer": service(request, say)}
        json.dumps(answer)
        return answer
    except AerieError as error:
        return {"problem": error.problem()}
    except MemoryError:
        return {"crash": "it needed more memory than it may have"}
    except Exception:
        return {"failed": traceback.format_exc()[-MAX_TRACEBACK:]}
    except BaseException as error:  # Rust's panics are no Exceptions
        return {"crash": f"{type(error).__name__}: {error}"[:500]}


class Allowance:
    """The CPU time of one request: the kernel ends the process by SIGPROF once it, or the part of it that one look may
    take, is used up."""

    def __init__(self, cpu_s: float, channel: socket.socket) -> None:
        self._end = time.process_time() + cpu_s
        self._channel = channel
        signal.setitimer(signal.ITIMER_PROF, cpu_s)

    def say(self, what: str, pointer: str | None, /, cpu_s: float | None = None) -> None:
        """See Say."""
        left = max(1e-3, self._end - time.process_time())
        within = left if cpu_s is None else min(cpu_s, left)
        _send(self._channel, {"at": [what, pointer, within]})
        signal.setitimer(signal.ITIMER_PROF, within)

    def end(self) -> None:
        """Count no more."""
        signal.setitimer(signal.ITIMER_PROF, 0)


def serve(service: Service, channel: socket.socket, cpu_s: float) -> None:
    """Answer until the other end closes. CPU time is counted anew for each request."""
    while True:
        try:
            request = _receive(channel)
            allowance = Allowance(cpu_s, channel)
            answer = _answer(service, request, allowance.say)
            allowance.end()
            _send(channel, answer)
        except (EOFError, OSError):  # whoever asks is gone
            return


def _confine(memory_bytes: int) -> None:
    """No core dumps, no files written, and no more address space than there is now and `memory_bytes`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if sys.platform == "linux":  # elsewhere the limit is not kept, and its unit differs
        with open("/proc/self/statm", "rb") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + memory_bytes, now + memory_bytes))


def main(arguments: list[str]) -> None:
    """Serve on an inherited socket: `SERVICE DESCRIPTOR CPU_S MEMORY_BYTES`."""
    name, descriptor, cpu_s, memory_bytes = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a person's Ctrl-C is for the process that asks
    module, _, function = name.partition(":")
    service: Service = getattr(importlib.import_module(module), function)
    _confine(int(memory_bytes))
    with socket.socket(fileno=int(descriptor)) as channel:
        _send(channel, "ready")
        serve(service, channel, float(cpu_s))


if __name__ == "__main__":
    main(sys.argv[1:])
