"""A scripted API, and processes that end with their test."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # the test modules of a folder share what lies beside them

from worker_stubs import TOKEN, ApiStub  # noqa: E402


@pytest.fixture
def api() -> Iterator[ApiStub]:
    stub = ApiStub()
    yield stub
    stub.stop()


@pytest.fixture
def start_worker(api: ApiStub, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts workers whose children run scripted stages; kills what is left."""
    token_file = tmp_path / "worker.token"
    started: list[subprocess.Popen[str]] = []

    def start(token: str = TOKEN) -> subprocess.Popen[str]:
        token_file.write_text(token)
        environment = {
            **os.environ,
            "AERIE_WORKER_TOKEN_FILE": str(token_file),
            "AERIE_STORE": f"file://{tmp_path}/store",
            "AERIE_SCRATCH": str(tmp_path / "scratch"),
        }
        command = [sys.executable, str(HERE / "scripted_worker.py"), "--url", api.url, "--worker-id", "w1"]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()
