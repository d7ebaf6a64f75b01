"""The supervisor of the embedded house: what dies is started again, and nothing is left behind."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from aerie_cli.house import how
from aerie_cli.lock import AlreadyUp, Lock

PATIENCE_S = 120


class Up:
    """A running `aerie up` and what it says."""

    def __init__(self, folder, *arguments):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aerie_cli", "up", "--dir", str(folder), *arguments],
            stderr=subprocess.PIPE, env={**os.environ, "AERIE_CACHE": str(folder / "cache")},
        )  # fmt: skip
        self.said = b""

    def hear(self, pattern: str) -> re.Match[str]:
        """Wait until it says `pattern`."""
        while not (found := re.search(pattern, self.said.decode())):
            assert select.select([self.process.stderr], [], [], PATIENCE_S)[0], f"never said {pattern}: {self.said}"
            piece = os.read(self.process.stderr.fileno(), 65536)
            assert piece, f"ended without saying {pattern}: {self.said}"
            self.said += piece
        self.said = self.said[found.end() :]
        return found

    def api_pid(self) -> int:
        return json.loads((self.folder / "run/server.json").read_text())["pid"]


@pytest.fixture
def up(tmp_path):
    started = []

    def start(*arguments):
        started.append(Up(tmp_path / "house", *arguments))
        return started[-1]

    yield start
    for running in started:
        running.process.terminate()
        running.process.wait()
        running.process.stderr.close()


def gone(handle: int) -> bool:
    """Whether the process of a pidfd has ended, waiting for it."""
    try:
        return bool(select.select([handle], [], [], PATIENCE_S)[0])
    finally:
        os.close(handle)


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.slow
def test_a_killed_api_comes_back_on_its_port_and_a_killed_worker_under_its_name(up):
    house = up("--workers", "1")
    url = house.hear(r"API at (http://127\.0\.0\.1:\d+), 1 workers").group(1)

    os.kill(house.api_pid(), signal.SIGKILL)
    house.hear("api ended with signal SIGKILL, starting it again")
    house.hear("the API is back")
    (worker,) = set(children(house.process.pid)) - {house.api_pid()}
    os.kill(worker, signal.SIGKILL)
    house.hear("worker-1 ended with signal SIGKILL, starting it again")

    assert json.loads((house.folder / "run/server.json").read_text())["url"] == url


@pytest.mark.slow
def test_sigterm_stops_everything_in_order_and_leaves_no_process(up):
    house = up("--workers", "1")
    house.hear("API at")
    handles = [os.pidfd_open(pid) for pid in children(house.process.pid)]

    house.process.send_signal(signal.SIGTERM)

    assert house.process.wait(PATIENCE_S) == 0
    assert len(handles) == 2
    assert all(gone(handle) for handle in handles)
    assert not (house.folder / "run/server.json").exists()


@pytest.mark.slow
def test_a_killed_supervisor_takes_everything_along(up):
    house = up("--workers", "1")
    house.hear("API at")
    handles = [os.pidfd_open(pid) for pid in children(house.process.pid)]

    house.process.kill()

    assert all(gone(handle) for handle in handles)


@pytest.mark.slow
def test_a_port_that_is_taken_ends_it_with_the_apis_own_words(up):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        house = up("--port", str(taken.getsockname()[1]), "--workers", "0")

        house.hear(r"(?s)error up\.failed.*server\.address.*remedy")
        assert house.process.wait(PATIENCE_S) == 1


def test_a_second_supervisor_is_refused_and_the_holder_named(tmp_path):
    lock = Lock(tmp_path)

    with pytest.raises(AlreadyUp, match=f"process {os.getpid()}"):
        Lock(tmp_path)

    lock.release()
    Lock(tmp_path).release()


def test_the_worker_token_is_readable_by_its_owner_alone(tmp_path):
    from aerie_cli.house import House

    house = House(tmp_path, 0, 0, lambda _: None)
    (tmp_path / "run").mkdir()
    house.write_token()

    assert (tmp_path / "run/worker.token").stat().st_mode & 0o777 == 0o600
    assert len((tmp_path / "run/worker.token").read_text().strip()) >= 32


@pytest.mark.parametrize(("code", "words"), [(0, "exit status 0"), (-9, "signal SIGKILL"), (-200, "signal 200")])
def test_an_exit_status_in_words(code, words):
    assert how(code) == words
