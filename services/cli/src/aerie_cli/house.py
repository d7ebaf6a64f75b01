"""The embedded house: one API and some workers in one folder, kept alive until it is told to stop.

A process that dies is started again, after a pause that doubles while it keeps dying at once. One case ends the house instead:
an API that never answered and reports itself why it cannot start (a port in use, a wrong setting), since it would fail again
in the same way. The API keeps its port and each worker its name, so that clients find the API again and a restarted worker
frees the leases of the process before it. Every process is tied to this one: if it is killed, the kernel ends the others.

    DIR/run      server.json, worker.token, up.lock      DIR/data     the database
    DIR/objects  the object store                        DIR/logs     one log for each process
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from aerie_cli.lock import Lock, require_writable
from aerie_cli.testimony import how, problem_in, read_server, tail
from eagle3_core.cores import THREADS_VARIABLE
from eagle3_core.errors import AerieError
from eagle3_core.folders import cache_folder
from eagle3_core.objects.s3_environment import without_store
from eagle3_core.tether import tethered

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0
STEADY_S = 30.0
"""A process that lived this long did not die at once: its next death is a first one."""
CRASH_LOOP = 4
"""Deaths at once after which it is said, and after which an API that never answered is given up."""
WORKER_GRACE_S, API_GRACE_S = 40.0, 15.0
"""A worker gives its child 25 s to save and then reports; an API finishes its answers in 10 s."""
LOG_KEEP_BYTES = 8 << 20
PROBLEM_BYTES = 65536
METRICS_VARIABLE = "AERIE_WORKER_METRICS_PORT"
PLACES = ("run", "data", "objects", "scratch", "logs")


class DidNotStart(AerieError):
    """The API ends as soon as it is started."""

    code, status = "up.failed", 500


@dataclass
class Part:
    """One process of the house, over its restarts."""

    name: str
    command: Callable[[], list[str]]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    deaths: int = 0
    """In a row, each soon after its start."""
    starts: int = 0
    start_again_at: float | None = None
    answered: bool = False
    waiter: threading.Thread | None = field(default=None, repr=False)

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None


@dataclass(frozen=True)
class Ended:
    """A part's process ended."""

    part: Part
    why: AerieError | None
    """What the process itself said of it, where it did."""


@dataclass(frozen=True)
class Answers:
    """The API says where it listens."""

    url: str


class House:
    """Starts, watches and stops the parts. Use it from the main thread: the kernel ties the parts to it."""

    def __init__(self, folder: Path, port: int, workers: int, threads: int, say: Callable[[str], None]) -> None:
        """`threads`: CPU threads of a unit that fans out, in each of `workers` workers."""
        self.folder = folder.absolute()
        self._port = port
        self._workers, self._threads = workers, threads
        self._say = say
        self._events: SimpleQueue[Ended | Answers | None] = SimpleQueue()
        self._asked = 0
        self._parts: dict[str, Part] = {}

    @property
    def server_file(self) -> Path:
        """Where the API says how to reach it."""
        return self.folder / "run" / "server.json"

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or SIGHUP.

        Raises AlreadyUp, UnusableFolder, DidNotStart, and as it is what the API says of a start that cannot succeed.
        """
        lock = Lock(self.folder)
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, self._on_signal)
            for name in PLACES:
                require_writable(self.folder / name)
            self.server_file.unlink(missing_ok=True)
            self.write_token()
            self._add("api", lambda: [sys.executable, "-m", "aerie_api"])
            self._watch()
        finally:
            self._stop()
            lock.release()

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._asked += 1
        self._events.put(None)
        if self._asked == 3:  # once more than polite
            for part in self._parts.values():
                if part.process is not None and part.alive:
                    part.process.kill()

    def write_token(self) -> None:
        """Make the fleet's token, once for the folder, readable by its owner alone."""
        path = self.folder / "run" / "worker.token"
        if not path.exists():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")

    def environment(self) -> dict[str, str]:
        """What every part is told."""
        roots = os.environ.get("AERIE_FILE_ROOTS") or os.pathsep.join(
            dict.fromkeys(map(str, (Path.cwd(), cache_folder(), self.folder)))
        )
        return {
            **os.environ,
            "AERIE_RUN_DIR": str(self.folder / "run"),
            "AERIE_DATA_DIR": str(self.folder / "data"),
            "AERIE_STORE": os.environ.get("AERIE_STORE") or (self.folder / "objects").as_uri(),
            "AERIE_SCRATCH": str(self.folder / "scratch"),
            "AERIE_CACHE": str(cache_folder()),
            "AERIE_WORKER_TOKEN_FILE": str(self.folder / "run" / "worker.token"),
            "AERIE_FILE_ROOTS": roots,
            "AERIE_PORT": str(self._port),
            THREADS_VARIABLE: str(self._threads),
        }

    def _add(self, name: str, command: Callable[[], list[str]]) -> None:
        self._parts[name] = Part(name, command, self.folder / "logs" / f"{name}.log")
        self._start(self._parts[name])

    def _start(self, part: Part) -> None:
        part.log.parent.mkdir(parents=True, exist_ok=True)
        if part.log.exists() and part.log.stat().st_size > LOG_KEEP_BYTES:
            part.log.replace(part.log.with_suffix(".log.1"))
        with part.log.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - the command is ours
                tethered(part.command()), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if part.name == "api" else log,
                stderr=log, env=as_told(self.environment(), part.name), process_group=0,
            )  # fmt: skip
        part.process, part.started_at, part.start_again_at = process, time.monotonic(), None
        part.starts += 1
        part.waiter = threading.Thread(target=self._wait_for, args=(part, process), daemon=True)
        part.waiter.start()
        if part.name == "api":
            threading.Thread(target=self._wait_for_answer, args=(part, process), daemon=True).start()

    def _wait_for(self, part: Part, process: subprocess.Popen[bytes]) -> None:
        said = b""
        if process.stdout is not None:
            with process.stdout as pipe:
                for line in pipe:
                    said = line[:PROBLEM_BYTES]
        process.wait()
        self._events.put(Ended(part, problem_in(said)))

    def _wait_for_answer(self, part: Part, process: subprocess.Popen[bytes]) -> None:
        """Tell when the API has written where it listens."""
        pause = threading.Event()
        while process.poll() is None:
            if (server := read_server(self.server_file)) is not None and server["pid"] == process.pid:
                self._events.put(Answers(str(server["url"])))
                return
            pause.wait(0.05)

    def _watch(self) -> None:
        while not self._asked:
            due = [p.start_again_at for p in self._parts.values() if p.start_again_at is not None]
            with suppress(Empty):
                event = self._events.get(timeout=max(0.0, min(due) - time.monotonic()) if due else None)
                if isinstance(event, Ended):
                    self._ended(event.part, event.why)
                elif isinstance(event, Answers):
                    self._answers(event.url)
            for part in self._parts.values():
                if part.start_again_at is not None and part.start_again_at <= time.monotonic() and not self._asked:
                    self._start(part)

    def _answers(self, url: str) -> None:
        api = self._parts["api"]
        if api.answered:
            self._say("the API is back")
            return
        api.answered = True
        self._port = int(url.rpartition(":")[2])
        for number in range(1, self._workers + 1):
            name = f"worker-{number}"
            self._add(name, lambda name=name: worker_command(url, name))
        crew = f"{self._workers} worker{'s' * (self._workers != 1)}"
        each = f" with {self._threads} thread{'s' * (self._threads != 1)} each" if self._workers else ""
        self._say(f"API at {url}, {crew}{each}, folder {self.folder}")

    def _ended(self, part: Part, why: AerieError | None) -> None:
        lived = time.monotonic() - part.started_at
        part.deaths = 1 if lived > STEADY_S else part.deaths + 1
        code = part.process.returncode if part.process is not None else 0
        if part.name == "api" and not part.answered:
            if why is not None:
                raise why
            if part.deaths >= CRASH_LOOP:
                raise DidNotStart(
                    f"the API ended with {how(code)} {part.deaths} times before it answered:\n{tail(part.log)}",
                    remedy=f"see {part.log}",
                )
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (part.deaths - 1))
        part.start_again_at = time.monotonic() + pause_s
        self._say(f"{part.name} ended with {how(code)}{f' ({why.detail})' if why else ''}, starting it again")
        if part.deaths == CRASH_LOOP:
            self._say(f"{part.name} keeps ending; its log {part.log} ends with:\n{tail(part.log)}")

    def _stop(self) -> None:
        """Workers first, so that they can report; then the API."""
        workers = [p for name, p in self._parts.items() if name != "api"]
        for group, grace_s in (
            (workers, WORKER_GRACE_S),
            ([p for p in self._parts.values() if p.name == "api"], API_GRACE_S),
        ):
            living = [p for p in group if p.process is not None and p.alive]
            for part in living:
                part.process.terminate()  # type: ignore[union-attr]
            until = time.monotonic() + grace_s
            for part in living:
                assert part.process is not None
                try:
                    part.process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    self._say(f"{part.name} does not stop, killing it")
                    part.process.kill()
                    part.process.wait()


def as_told(environment: dict[str, str], name: str) -> dict[str, str]:
    """`environment` for the part `name`. AERIE_WORKER_STORE=lent leaves workers without a key to the store: the API lends them
    its objects, as it does to workers of a cluster."""
    environment = with_own_metrics(environment, name)
    if not name.startswith("worker-") or environment.get("AERIE_WORKER_STORE") != "lent":
        return environment
    return without_store(environment)


def with_own_metrics(environment: dict[str, str], name: str) -> dict[str, str]:
    """`environment` for the part `name`: a port serves one process, so worker-2 takes the one above worker-1's."""
    port = environment.get(METRICS_VARIABLE, "")
    if not name.startswith("worker-") or not port.isdecimal() or int(port) == 0:
        return environment
    return {**environment, METRICS_VARIABLE: str(int(port) + int(name.removeprefix("worker-")) - 1)}


def worker_command(url: str, name: str) -> list[str]:
    """The command line of the worker called `name`."""
    return [sys.executable, "-m", "aerie_worker", "--url", url, "--worker-id", name]
