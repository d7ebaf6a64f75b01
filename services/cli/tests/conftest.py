"""A real API over a folder of its own, with a small job to post; no worker, so jobs stay queued."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle3_core import strict_json
from eagle3_core.testing import tiny_job

sys.path.append(str(Path(__file__).parent))  # the test modules of a folder share what lies beside them


class Aerie:
    """The command, pointed at one API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, *arguments: str, stdin: str | bytes | None = None, columns: int = 200) -> Any:
        """Run the command; its result (exit_code, stdout, stderr). What nobody foresaw fails the test."""
        from aerie_cli.main import app

        env = {"AERIE_URL": self.url, "COLUMNS": str(columns)}
        result = CliRunner().invoke(app, list(arguments), input=stdin, env=env)
        assert "Traceback" not in result.stderr, result.stderr
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    def json(self, *arguments: str, stdin: str | None = None) -> Any:
        """Run the command with --json; its document, which holds nothing that JSON does not know."""
        return strict_json.loads(self(*arguments, "--json", stdin=stdin).stdout)


@pytest.fixture(scope="session")
def offline() -> Aerie:
    """The command where no API runs."""
    return Aerie("")


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_job(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def aerie(job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aerie]:
    folder = tmp_path_factory.mktemp("house")
    environment = {
        **os.environ,
        "AERIE_RUN_DIR": str(folder / "run"),
        "AERIE_DATA_DIR": str(folder / "data"),
        "AERIE_FILE_ROOTS": str(Path(job["verifier"]["model"]).parent),
    }
    log = (folder / "api.log").open("wb")
    process = subprocess.Popen([sys.executable, "-m", "aerie_api"], env=environment, stdout=log, stderr=log)
    server, tick = folder / "run" / "server.json", threading.Event()
    while not server.exists():
        assert process.poll() is None, (folder / "api.log").read_text()
        tick.wait(0.02)
    yield Aerie(json.loads(server.read_text())["url"])
    process.terminate()
    process.wait()
    log.close()


@pytest.fixture
def named(job: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    """The job under a name of the test's own."""
    return {**job, "name": request.node.name[:60].replace("_", "-").replace("[", "-").strip("-]").lower()}
