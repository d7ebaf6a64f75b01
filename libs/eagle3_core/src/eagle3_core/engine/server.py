"""Starts SGLang, waits until it serves, and stops all of its processes.

A server that was started to capture proves itself by a capture before anyone else may use it: the receipt must name the
layers and the norm that were asked for. A server ends with the process that started it, however that ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eagle3_core.engine.capture import capture_request, receipt_of
from eagle3_core.engine.client import Client
from eagle3_core.engine.config import CAPTURE_VARIABLE, TRAFFIC_VARIABLE, CaptureConfig, ServerConfig, arguments
from eagle3_core.engine.refusals import ServerFailed
from eagle3_core.engine.settings import EngineSettings
from eagle3_core.objects.location import store_at
from eagle3_core.verifier.receipt import Receipt

POLL_S = 0.25
STOP_S = 20.0
"""How long a server may take to end by itself before it is killed."""
SAY_S = 15.0
"""How often a start that goes on is said."""
LOG_TAIL_BYTES = 3000
PROOF = (1, 2, 3, 4, 5)
"""Token ids of the capture that proves a server."""


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running server. Use it as a context, or call `stop`."""

    def __init__(self, config: ServerConfig, log: Path, environment: Mapping[str, str] = os.environ) -> None:
        """Start the processes; `wait` until they serve. Their output goes to `log`."""
        self.config, self.log, self._stopped = config, log, False
        self.port = config.port or free_port()
        command = [
            str(config.python), "-m", "eagle3_core.tether", str(os.getpid()),
            str(config.python), "-m", "sglang.launch_server", *arguments(config, self.port),
        ]  # fmt: skip
        env = {name: value for name, value in environment.items() if name not in (CAPTURE_VARIABLE, TRAFFIC_VARIABLE)}
        if config.capture is not None:
            env[CAPTURE_VARIABLE] = config.capture.model_dump_json()
        if config.traffic is not None:
            env[TRAFFIC_VARIABLE] = config.traffic.model_dump_json()
        with log.open("wb") as out:
            self._process = subprocess.Popen(  # noqa: S603 - the arguments are made above, no shell reads them
                command, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://{self.config.host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process and process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def client(self) -> Client:
        """Speaks to it."""
        return Client(self.url)

    def wait(self, say: Callable[[str], None] = lambda line: None, go_on: Callable[[], None] = lambda: None) -> Self:
        """Return when the server serves, and has proved its capture. Raises ServerFailed with the end of its log.

        `say` hears now and then how long it takes; `go_on` raises to stop waiting.
        """
        started = said = time.monotonic()
        while not self.healthy():
            self.check()
            go_on()
            if (now := time.monotonic()) > started + self.config.start_s:
                raise self._failure(f"the server does not serve after {self.config.start_s:g} s")
            if now >= said + SAY_S:
                said = now
                say(f"the engine has been starting for {now - started:.0f} s")
            time.sleep(POLL_S)
        if self.config.capture is not None:
            self._prove(self.config.capture)
        return self

    def check(self) -> None:
        """Raise ServerFailed if the server has ended."""
        if not self.alive:
            raise self._failure(f"the server ended with status {self._process.returncode}")

    def healthy(self) -> bool:
        """Whether it answers, all of its warm-up done (503 until then)."""
        return self.client.status("/health") == 200

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to a JSON request. Raises ServerFailed, and whatever error the capture plug-in answers with."""
        try:
            return self.client.post(path, body)
        except ServerFailed as error:
            raise self._failure(error.detail) from None

    def capture(self, ids: Sequence[int]) -> Receipt:
        """Capture the states of one prompt. Raises what the server answers, and ReceiptWrong."""
        return receipt_of(self.post("/generate", capture_request(ids)), ids)

    def _prove(self, capture: CaptureConfig) -> None:
        receipt = self.capture(PROOF)
        have, want = (receipt.aux_layers, receipt.final), (capture.aux_layers, capture.final)
        if have != want:
            raise self._failure(f"the server captures layers and final norm {have}, asked for were {want}")
        store_at(capture.sink).delete(receipt.key)  # nobody asked for these states

    def _failure(self, what: str) -> ServerFailed:
        end = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return ServerFailed(
            f"{what}; the end of {self.log}:\n{end}", remedy="mend what its log names, then start it again"
        )

    def stop(self) -> None:
        """End the whole process group: first asked to, then killed. Once is enough: its number may be another's later."""
        if self._stopped:
            return
        self._stopped = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()

    def __enter__(self) -> Self:
        try:
            return self.wait()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@contextmanager
def running_server(
    config: ServerConfig,
    settings: EngineSettings,
    *,
    say: Callable[[str], None] = lambda line: None,
    go_on: Callable[[], None] = lambda: None,
) -> Generator[Server]:
    """A server that serves within the block. Its log lies beside the states, in the settings' scratch folder.

    Raises ServerFailed with the end of its log, and what `go_on` raises while it starts.
    """
    settings.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="engine-", dir=settings.scratch, ignore_cleanup_errors=True) as folder:
        server = Server(config, Path(folder) / "log", settings.merged())
        try:
            yield server.wait(say, go_on)
        finally:
            server.stop()
