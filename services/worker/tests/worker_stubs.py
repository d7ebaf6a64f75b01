"""The API's internal routes with a script instead of a database: tests say what it answers and read what it was told."""

import contextlib
import json
import os
import select
import sys
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue

from eagle3_core.errors import AerieError
from eagle3_core.jobs.spec import parse_job
from eagle3_core.jobs.wire import Assignment, UnitSlice

TOKEN = "worker-token"
SCRIPTED_CHILD = Path(__file__).parents[3] / "libs/eagle3_core/tests/scripted_child.py"


def scripted_child() -> list[str]:
    """The command line of a child whose stages do what the job's metadata says."""
    return [sys.executable, str(SCRIPTED_CHILD), "--parent", str(os.getpid())]


def gone(pid: int, timeout_s: float = 30) -> bool:
    """Whether the process `pid` ends within `timeout_s` (its descriptor turns readable then)."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


def assignment(does: str, stage: str = "prepare", token: str = "attempt-token") -> Assignment:
    """A unit whose scripted stage does `does`."""
    spec = parse_job(
        {
            "name": "tiny",
            "verifier": {"model": "file:///verifier"},
            "datasets": [{"uri": "file:///train.jsonl"}],
            "evaluation": {"prompts": [{"uri": "file:///test.jsonl"}]},
            "metadata": {"does": does},
        }
    )
    return Assignment(
        unit_run_id="u1", job_id="j1", tenant="default", stage=stage, unit=UnitSlice(index=0, start=0, stop=1, of=1),
        attempt=1, fence=1, token=token, key="k" * 64, spec=spec, sources={"verifier": "v1"}, inputs={}, results={},
        lease_s=60,
    )  # fmt: skip


class Lost(AerieError):
    code, status = "lease.lost", 409


class ApiStub:
    """Listens on a free port of the loopback."""

    def __init__(self) -> None:
        self.units: SimpleQueue[Assignment] = SimpleQueue()
        self.told: dict[str, SimpleQueue] = defaultdict(SimpleQueue)
        """What arrived, by the last word of its route, as (body, attempt token)."""
        self.cancel = False
        self.answers: dict[str, int | AerieError] = {}
        """Status or error to answer a route with instead of success."""
        self.stops: dict[str, dict] = {}
        self.stopping = threading.Condition()
        self.closed = False
        self.server: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen; on the same port as before, if there was one."""
        stub, self.closed = self, False

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                stub.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Stop listening: the next call finds nobody."""
        assert self.server is not None
        with self.stopping:
            self.closed = True
            self.stopping.notify_all()
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        word = request.path.rpartition("/")[2]
        answer = self.answers.get(word)
        token = request.headers["Authorization"].removeprefix("Bearer ")
        self.told[word].put((body, token))
        if token != (TOKEN if word in ("claim", "stops") else "attempt-token"):
            return self._send(request, 401, {"code": "worker.token", "detail": "not a worker", "status": 401})
        if isinstance(answer, AerieError):
            return self._send(request, answer.status, answer.problem())
        if isinstance(answer, int):
            return self._send(request, answer, {})
        if word == "claim":
            return self._claim(request, body["only"] or body["queues"])
        if word == "stops":
            return self._stops(request, body)
        return self._send(request, 200, {"cancel": self.cancel, "lease_s": 60} if word == "heartbeat" else {})

    def _stops(self, request: BaseHTTPRequestHandler, body: dict) -> None:
        """Stays on the line until something is to stop that the worker does not know of."""
        with self.stopping:
            self.stopping.wait_for(lambda: self._untold(body["known"]) or self.closed, body["wait_s"])
            units = self._untold(body["known"])
        with contextlib.suppress(ConnectionError):  # the worker may have ended meanwhile
            self._send(request, 200, {"units": units})

    def _untold(self, known: dict[str, int]) -> dict[str, dict]:
        return {unit: answer for unit, answer in self.stops.items() if known.get(unit) != answer["fence"]}

    def stop_unit(self, unit: str, fence: int, **answer: bool) -> None:
        """Want the attempt `fence` at `unit` to stop, as `answer` says (cancel or give_back)."""
        with self.stopping:
            self.stops[unit] = {"lease_s": 60, "fence": fence, **answer}
            self.stopping.notify_all()

    def stop_nothing(self) -> None:
        """Want nothing to stop any more."""
        with self.stopping:
            self.stops.clear()

    def _claim(self, request: BaseHTTPRequestHandler, queues: list[str]) -> None:
        try:
            unit = self.units.get(timeout=0.2)
        except Empty:
            return self._send(request, 204, None)
        return self._send(request, 200, unit.model_dump(mode="json"))

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, status: int, body: object) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def next(self, word: str) -> tuple[dict, str | None]:
        """The next thing that was told on a route, waiting for it."""
        return self.told[word].get(timeout=30)

    def heard(self, word: str) -> list[tuple[dict, str | None]]:
        """Everything told on a route and not read yet."""
        found = []
        while not self.told[word].empty():
            found.append(self.told[word].get())
        return found

    def heartbeat_with_note(self, note: str) -> dict:
        """Wait for the heartbeat whose progress says `note` (a prefix); its progress."""
        while True:
            beat, _ = self.next("heartbeat")
            progress = beat.get("progress") or {}
            if progress.get("note", "").startswith(note):
                return progress
