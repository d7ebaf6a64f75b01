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

from aerie_cli.exits import status_of
from aerie_cli.house import House, with_own_metrics
from aerie_cli.lock import AlreadyUp, Lock
from aerie_cli.testimony import how, problem_in
from aerie_cli.up import crew
from eagle3_core.cores import default_workers, share, usable_cores
from eagle3_core.errors import AerieError

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
    url = house.hear(r"API at (http://127\.0\.0\.1:\d+), 1 worker with").group(1)

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
def test_a_port_that_is_taken_ends_it_at_once_with_status_2_and_the_remedy(up):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        house = up("--port", str(port), "--workers", "0")

        house.hear(
            rf"^error server\.address: cannot listen on 127\.0\.0\.1 port {port}: Address already in use\n  remedy: .*--port"
        )
        assert house.process.wait(PATIENCE_S) == 2


def wrong_setting(folder):
    return {"AERIE_LEASE_S": "soon"}


def open_to_all(folder):
    return {"AERIE_HOST": "0.0.0.0", "AERIE_ALLOW_PLAIN_HTTP": "1", "AERIE_KEYS_REQUIRED": "0"}


def in_clear_text(folder):
    return {"AERIE_HOST": "0.0.0.0"}


def weak_token(folder):
    (folder / "run").mkdir(parents=True)
    (folder / "run/worker.token").write_text("short")
    return {}


def token_that_is_no_text(folder):
    (folder / "run").mkdir(parents=True)
    (folder / "run/worker.token").write_bytes(b"\xff" * 40)
    return {}


def damaged_database(folder):
    (folder / "data").mkdir(parents=True)
    (folder / "data/aerie.db").write_bytes(b"no database" * 1000)
    return {}


def store_in_the_way(folder):
    folder.mkdir()
    (folder / "objects").write_text("")
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (wrong_setting, "settings.invalid"),
        (open_to_all, "settings.remote_bind"),
        (in_clear_text, "settings.plain_http"),
        (weak_token, "settings.worker_token"),
        (token_that_is_no_text, "server.place"),
        (damaged_database, "server.place"),
        (store_in_the_way, "up.folder"),
    ],
)
def test_what_a_restart_cannot_mend_is_said_once_and_ends_it(tmp_path, spoil, code):
    environment = {**os.environ, **spoil(tmp_path / "house")}
    command = [sys.executable, "-m", "aerie_cli", "up", "--dir", str(tmp_path / "house"), "--workers", "0", "--json"]

    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=PATIENCE_S)

    (problem,) = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, problem["code"]) == (2, code)
    assert problem["title"]
    assert problem["remedy"]
    assert done.stderr == b""


@pytest.mark.slow
def test_a_database_that_another_api_has_open_is_named(up, tmp_path):
    first = up("--workers", "0")
    first.hear("API at")
    (first.folder / "run/up.lock").unlink()  # as if it lay on a file system without locks

    second = up("--workers", "0")

    second.hear(r"^error database\.in_use: .*aerie\.db is open in another API process")
    assert second.process.wait(PATIENCE_S) == 2


def test_an_api_that_says_why_it_ended_is_understood_and_other_words_are_not_taken_for_it():
    told = problem_in(
        b'{"code": "server.unheard_of", "status": 409, "detail": "taken", "remedy": "free it", "title": "T"}\n'
    )

    assert isinstance(told, AerieError)
    assert (told.code, told.detail, told.title, status_of(told)) == ("server.unheard_of", "taken", "T", 2)
    for words in (b"", b"Traceback", b"{}", b"[1]", b'{"code": 3}', b"\xff", b"[" * 9000):
        assert problem_in(words) is None


@pytest.mark.parametrize(
    ("workers", "threads", "environment", "crewed"),
    [
        (None, None, "", (default_workers(usable_cores()), share(usable_cores(), default_workers(usable_cores())))),
        (1, None, "", (1, usable_cores())),
        (0, None, "", (0, usable_cores())),
        (3, 2, "", (3, 2)),
        (3, None, "5", (3, 5)),
        (3, 2, "5", (3, 2)),
    ],
)
def test_workers_and_threads_come_from_the_options_the_environment_and_the_cores(
    monkeypatch, workers, threads, environment, crewed
):
    monkeypatch.setenv("AERIE_THREADS", environment)

    assert crew(workers, threads) == crewed


def test_the_help_says_how_workers_and_threads_are_chosen(offline):
    for command in ("up", "demo"):
        told = " ".join(offline(command, "--help").stdout.replace("│", " ").split())
        assert "one for every four cores, at most 4" in told
        assert "the cores shared out among the workers" in told


def test_a_store_that_is_named_is_the_houses(tmp_path, monkeypatch):
    monkeypatch.delenv("AERIE_STORE", raising=False)
    house = House(tmp_path, 0, 2, 3, lambda _: None)

    assert house.environment()["AERIE_STORE"] == (tmp_path / "objects").as_uri()
    monkeypatch.setenv("AERIE_STORE", "s3://states/a")
    assert house.environment()["AERIE_STORE"] == "s3://states/a"


def test_workers_are_told_their_threads(tmp_path):
    assert House(tmp_path, 0, 2, 3, lambda _: None).environment()["AERIE_THREADS"] == "3"


def test_a_second_supervisor_is_refused_and_the_holder_named(tmp_path):
    lock = Lock(tmp_path)

    with pytest.raises(AlreadyUp, match=f"process {os.getpid()}"):
        Lock(tmp_path)

    lock.release()
    Lock(tmp_path).release()


def test_the_worker_token_is_readable_by_its_owner_alone(tmp_path):
    house = House(tmp_path, 0, 0, 1, lambda _: None)
    (tmp_path / "run").mkdir()
    house.write_token()

    assert (tmp_path / "run/worker.token").stat().st_mode & 0o777 == 0o600
    assert len((tmp_path / "run/worker.token").read_text().strip()) >= 32


@pytest.mark.parametrize(("code", "words"), [(0, "exit status 0"), (-9, "signal SIGKILL"), (-200, "signal 200")])
def test_an_exit_status_in_words(code, words):
    assert how(code) == words


def test_each_worker_of_a_house_serves_its_metrics_at_a_port_of_its_own():
    asked = {"AERIE_WORKER_METRICS_PORT": "9465"}

    ports = [with_own_metrics(asked, name)["AERIE_WORKER_METRICS_PORT"] for name in ("worker-1", "worker-2", "api")]

    assert ports == ["9465", "9466", "9465"]
    for none in ({}, {"AERIE_WORKER_METRICS_PORT": "off"}, {"AERIE_WORKER_METRICS_PORT": "0"}):
        assert with_own_metrics(none, "worker-2") == none
