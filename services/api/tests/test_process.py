"""Settings, database file, migrations, and the process that serves."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.request
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from aerie_api.db import Database, tell
from aerie_api.engines import DatabaseInUse
from aerie_api.house import House, Parts, WeakToken, worker_token
from aerie_api.server import Server, listen
from aerie_api.settings import InvalidSettings, RemoteBindRefused, Settings, read_settings
from aerie_api.tables import Worker
from eagle3_core.addresses import PlainHttpRefused


@pytest.fixture
def db(tmp_path):
    db = Database(tmp_path / "aerie.db")
    yield db
    db.close()


def a_worker() -> Worker:
    return Worker(id="w", incarnation="1", queues=[], first_seen=0, last_seen=0)


def test_the_body_of_an_answer_does_not_wait_for_the_clients_word_on_its_headers():
    with listen(Settings()) as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_an_idle_connection_is_closed_by_the_client_first(tmp_path):
    """Else a worker's next request may meet a connection that is just being closed."""
    settings = Settings(run_dir=tmp_path / "run", data_dir=tmp_path / "data")
    with closing(House(settings, Parts(reaper=False))) as house, listen(settings) as listening:
        expiry_s = httpx.Limits().keepalive_expiry
        assert expiry_s is not None
        assert Server(house, listening).config.timeout_keep_alive > expiry_s


def test_only_one_process_opens_the_database(db, tmp_path):
    with pytest.raises(DatabaseInUse, match=str(os.getpid())):
        Database(tmp_path / "aerie.db")
    db.close()
    Database(tmp_path / "aerie.db").close()


def test_a_transaction_that_raises_leaves_nothing_and_tells_nobody(tmp_path):
    heard = []
    db = Database(tmp_path / "aerie.db", heard.append)

    def write(fails: bool) -> None:
        with db.write() as session:
            session.add(a_worker())
            tell(session, "work")
            if fails:
                raise KeyError

    with pytest.raises(KeyError):
        write(fails=True)
    assert heard == []
    write(fails=False)
    assert heard == ["work"]
    with db.read() as session:
        assert len(session.scalars(select(Worker)).all()) == 1
    db.close()


def test_a_writer_sees_no_other_writer_and_readers_see_one_state(db, tmp_path):
    with db.write() as session:
        session.add(a_worker())
        session.flush()
        with db.read() as reader:
            assert reader.scalars(select(Worker)).all() == []
        other = sqlite3.connect(tmp_path / "aerie.db", timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.close()


def test_settings_are_read_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("AERIE_FILE_ROOTS", f"/a{os.pathsep}/b")
    monkeypatch.setenv("AERIE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("AERIE_PORT", "")
    settings = read_settings()
    assert settings.roots == (Path("/a"), Path("/b"))
    assert settings.store_url == (tmp_path / "objects").as_uri()
    assert (settings.host, settings.port, settings.lease_s, settings.max_attempts) == ("127.0.0.1", 0, 60.0, 3)


def test_an_odd_setting_is_named(monkeypatch):
    monkeypatch.setenv("AERIE_LEASE_S", "soon")
    with pytest.raises(InvalidSettings, match="AERIE_LEASE_S"):
        read_settings()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "aerie.example"])
def test_an_address_that_others_can_reach_asks_for_encryption_and_keys(monkeypatch, host):
    monkeypatch.setenv("AERIE_HOST", host)
    with pytest.raises(PlainHttpRefused, match="clear text"):
        read_settings()
    monkeypatch.setenv("AERIE_ALLOW_PLAIN_HTTP", "1")
    assert read_settings().asks_for_keys
    monkeypatch.setenv("AERIE_KEYS_REQUIRED", "0")
    with pytest.raises(RemoteBindRefused, match="no API key"):
        read_settings()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AERIE_ALLOWED_HOSTS", "aerie.example"),
        ("AERIE_ALLOW_PLAIN_HTTP", "1"),
        ("AERIE_DATABASE_URL", "postgresql://aerie@db/aerie"),
    ],
)
def test_only_the_embedded_house_needs_no_keys(monkeypatch, variable, value):
    assert not read_settings().asks_for_keys
    monkeypatch.setenv(variable, value)
    assert read_settings().asks_for_keys


def test_the_worker_token_is_made_once_and_private(tmp_path):
    place = tmp_path / "run" / "worker.token"
    token = worker_token(place)
    assert worker_token(place) == token
    assert place.stat().st_mode & 0o077 == 0
    place.write_text("short")
    with pytest.raises(WeakToken):
        worker_token(place)


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    given = {"AERIE_RUN_DIR": str(folder / "run"), "AERIE_DATA_DIR": str(folder / "data"), **environment}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("AERIE_")}
    command = [sys.executable, "-m", "aerie_api"]
    return subprocess.Popen(command, env=kept | given, stderr=subprocess.PIPE, text=True, cwd=folder)


def wait_until_serving(process: subprocess.Popen[str]) -> list[str]:
    """Read its log up to the line that says that it serves."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "serving at" in line:
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.slow
def test_the_process_says_where_it_is_and_takes_it_back(tmp_path):
    process = start(tmp_path)
    try:
        wait_until_serving(process)
        where = json.loads((tmp_path / "run" / "server.json").read_text())
        assert where["pid"] == process.pid
        with urllib.request.urlopen(f"{where['url']}/readyz") as answer:
            assert json.load(answer)["status"] == "ready"
        token = (tmp_path / "run" / "worker.token").read_text().strip()
        waiting = subprocess.Popen(
            [sys.executable, "-c", _LONG_POLL, where["url"], token], stdout=subprocess.PIPE, text=True
        )
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "asking\n"
        second = start(tmp_path)
        _, said = second.communicate(timeout=60)
        assert second.returncode == 2
        assert "database.in_use" in said
        assert str(process.pid) in said
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
        assert waiting.communicate(timeout=60)[0] == "204\n"
        assert not (tmp_path / "run" / "server.json").exists()
    finally:
        process.kill()
        process.communicate()


_LONG_POLL = """
import http.client, json, sys, urllib.parse
url = urllib.parse.urlsplit(sys.argv[1])
ask = http.client.HTTPConnection(url.hostname, url.port)
body = json.dumps({"worker_id": "w", "incarnation": "1", "queues": ["prep"], "wait_s": 60})
ask.request("POST", "/internal/v1/claim", body, {"Content-Type": "application/json", "Authorization": "Bearer " + sys.argv[2]})
print("asking", flush=True)
print(ask.getresponse().status, flush=True)
"""


@pytest.mark.slow
def test_a_process_that_cannot_start_says_why(tmp_path):
    process = start(tmp_path, AERIE_HOST="0.0.0.0")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "AERIE_ALLOW_PLAIN_HTTP" in said


def test_settings_with_defaults_are_loopback():
    assert Settings().loopback
