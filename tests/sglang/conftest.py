"""Real SGLang servers for these tests, on the CPU: three processes of 1 to 2 GB each.

Run by `make test-sglang`, in an environment of its own. What takes time is the start of a server: 16 s of CPU for its
imports, in each of its processes. So tests of one module share a server where they can, and the scheduler and the
detokenizer of most are forked from the first process (`FORKED`), with its imports. The engine itself spawns them: the
servers of `test_capture.py` and `test_refusals.py` do so too.

No clock ends a test that a starved machine makes slow: a server is waited for until it serves or has ended.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from servers.s3 import OwnServer, own

from eagle3_core.engine.config import CaptureConfig, ServerConfig
from eagle3_core.engine.server import Server
from eagle3_core.testing import tiny_verifier

HERE = Path(__file__).parent
CPU_ARGS = ("--attention-backend", "torch_native", "--disable-cuda-graph", "--grammar-backend", "none")
"""What the CPU engine needs without compiled kernels."""
AUX_LAYERS = (2, 4, 5)
"""Layers of the tiny verifier (8 layers) that these tests capture."""

Launch = Callable[..., Server]


CPU_VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(HERE / "cpu_engine"),
}  # fmt: skip
"""The environment of a CPU engine: one thread (two cost 8 ms an operator here), the stand-in kernels on the path."""
FORKED = {"AERIE_CPU_ENGINE_FORK": "1"}
"""Has the CPU engine fork its processes."""
SPAWNED: dict[str, str] = {}
"""Leaves them to the engine."""
PATIENCE_S = 3600.0
"""Longer than any start takes on a machine that is good for anything: what ends a wait is the server."""


def cpu_environment() -> dict[str, str]:
    """This environment, for a CPU engine."""
    return {**os.environ, **CPU_VARIABLES}


def cpu_variables(python: str) -> dict[str, str]:
    """A worker's settings for the CPU engine in the environment of the interpreter `python`."""
    return {
        "AERIE_SGLANG_PYTHON": python, "AERIE_SGLANG_ENV": json.dumps({**CPU_VARIABLES, **FORKED}),
        "AERIE_SGLANG_ARGS": shlex.join(CPU_ARGS), "AERIE_SGLANG_START_S": str(PATIENCE_S),
    }  # fmt: skip


def cpu_server(model: Path, log: Path, environment: dict[str, str] = FORKED, **options: object) -> Server:
    """A server on the CPU that has been started, and not waited for; `environment` is what it gets beside a CPU engine's."""
    defaults = {
        "model": model, "device": "cpu", "dtype": "float32", "chunked_prefill_tokens": 64, "max_running_requests": 8,
        "max_total_tokens": 16384, "engine_args": CPU_ARGS, "start_s": PATIENCE_S,
    }  # fmt: skip
    return Server(ServerConfig.model_validate({**defaults, **options}), log, {**cpu_environment(), **environment})


@pytest.fixture(scope="session")
def stopping() -> Iterator[Callable[[Server], None]]:
    """Stops a server beside what comes next: the engine looks every 5 s only whether it was asked to end."""
    threads: list[threading.Thread] = []

    def stop(server: Server) -> None:
        threads.append(threading.Thread(target=server.stop))
        threads[-1].start()

    yield stop
    for thread in threads:
        thread.join()


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, stopping: Callable[[Server], None]) -> Iterator[Launch]:
    """Start a server and wait for it; all are stopped when the module's tests are done."""
    with ExitStack() as running:

        def start(model: Path, environment: dict[str, str] = FORKED, **options: object) -> Server:
            server = cpu_server(model, tmp_path_factory.mktemp("server") / "log", environment, **options)
            running.callback(stopping, server)
            return server.wait()

        yield start


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    """A real S3 server, whose credentials are in the environment of what is started from here."""
    server = own(tmp_path_factory.mktemp("s3"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.stop()


@pytest.fixture(scope="module")
def cpu_engine() -> Iterator[None]:
    """A worker's settings: this environment's SGLang, on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cpu_variables(sys.executable).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny verifier, one for each module."""
    return tiny_verifier(tmp_path_factory.mktemp("verifier") / "tiny")


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the module's server captures to."""
    return tmp_path_factory.mktemp("sink")


def capture_to(folder: Path, **options: object) -> CaptureConfig:
    """Capture the test's layers into `folder`."""
    return CaptureConfig.model_validate({"sink": folder.as_uri(), "aux_layers": AUX_LAYERS, **options})
