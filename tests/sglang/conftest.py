"""Real SGLang servers for these tests, on the CPU, one at a time: three processes of 1 to 2 GB each.

Run by `make test-sglang`, in an environment of its own. A server costs about 20 s of start, so tests of one module share
it where they can.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

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


def cpu_environment() -> dict[str, str]:
    """This environment, for a CPU engine."""
    return {**os.environ, **CPU_VARIABLES}


def cpu_variables(python: str) -> dict[str, str]:
    """A worker's settings for the CPU engine in the environment of the interpreter `python`."""
    return {
        "AERIE_SGLANG_PYTHON": python, "AERIE_SGLANG_ENV": json.dumps(CPU_VARIABLES),
        "AERIE_SGLANG_ARGS": shlex.join(CPU_ARGS), "AERIE_SGLANG_START_S": "500",
    }  # fmt: skip


def cpu_server(model: Path, log: Path, environment: dict[str, str] | None = None, **options: object) -> Server:
    """A server on the CPU that has been started, and not waited for."""
    defaults = {
        "model": model, "device": "cpu", "dtype": "float32", "chunked_prefill_tokens": 64, "max_running_requests": 8,
        "max_total_tokens": 16384, "engine_args": CPU_ARGS, "start_s": 500,
    }  # fmt: skip
    return Server(
        ServerConfig.model_validate({**defaults, **options}), log, {**cpu_environment(), **(environment or {})}
    )


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Start a server and wait for it; all are stopped when the module's tests are done."""
    with ExitStack() as running:

        def start(model: Path, **options: object) -> Server:
            log = tmp_path_factory.mktemp("server") / "log"
            return running.enter_context(cpu_server(model, log, **options))

        yield start


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
