"""Both databases: migrations, and what Postgres must stand that SQLite never meets: other processes, and its own restart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from servers.postgres import start
from sqlalchemy import inspect, make_url, text

from aerie_api import db as db_module
from aerie_api.db import Database, downgrade, tell, upgrade
from aerie_api.engines import DatabaseAway
from aerie_api.jobs.service import JobService
from aerie_api.settings import InvalidSettings, read_settings
from aerie_api.tables import Base, Worker

MIGRATIONS = Path(db_module.__file__).parent / "migrations"
REVISIONS = [r.revision for r in ScriptDirectory(str(MIGRATIONS)).walk_revisions()][::-1]


@pytest.fixture
def place(database: Callable[[str], str], tmp_path: Path) -> Any:
    """Where an empty database is, on either kind."""
    return make_url(url) if (url := database("a")) else tmp_path / "aerie.db"


@pytest.fixture
def db(place: Any) -> Any:
    db = Database(place)
    yield db
    db.close()


def differences(db: Database) -> list[Any]:
    with db.engine.connect() as connection:
        options = {"compare_type": True, "compare_server_default": True}
        return compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata)


def test_migrations_make_exactly_the_tables_that_the_code_uses(db):
    assert differences(db) == []


@pytest.mark.parametrize("revision", ["base", *REVISIONS])
def test_migrations_go_down_to_every_revision_and_up_again(db, revision):
    with db._writer.begin() as connection:
        downgrade(connection, revision)
        tables = set(inspect(connection).get_table_names())
    assert tables == {"alembic_version"} if revision == "base" else {"jobs", "units"} < tables
    with db._writer.begin() as connection:
        upgrade(connection)
    assert differences(db) == []


def test_rows_survive_every_migration(make_api, all_stages):
    api = make_api()
    job = api.post()
    worker, unit = api.reach("train")
    worker.beat(unit, metrics=[{"name": "loss", "value": 1.0, "step": 3}], logs=[{"at": 1.0, "text": "hello"}])
    worker.run()
    before = api.job(job["id"])
    for revision in REVISIONS[-2::-1]:
        with api.house.db._writer.begin() as connection:
            downgrade(connection, revision)
        with api.house.db._writer.begin() as connection:
            upgrade(connection)
    assert api.job(job["id"]) == before
    assert [p["value"] for p in api.http.get(f"/jobs/{job['id']}/metrics").json()["data"]] == [1.0]
    assert [e["text"] for e in api.http.get(f"/jobs/{job['id']}/logs").json()["data"]] == ["hello"]


# -- Postgres alone

only_postgres = pytest.mark.parametrize("database", ["postgres"], indirect=True)


@only_postgres
def test_steps_are_as_large_as_a_report_may_say(api):
    job = api.post()
    worker, unit = api.reach("train")
    assert worker.beat(unit, metrics=[{"name": "loss", "value": 1.0, "step": 1 << 53}]).status_code == 200
    assert [p["step"] for p in api.http.get(f"/jobs/{job['id']}/metrics").json()["data"]] == [1 << 53]


def test_what_postgres_cannot_hold_is_refused_or_made_readable(api, document):
    odd = document(metadata={"note": "a\x00b"})
    assert api.http.post("/jobs", json=odd).json()["errors"][0]["pointer"] == "/metadata/note"
    assert api.http.get("/jobs/job%00").status_code in (404, 422)
    assert api.http.get("/jobs?after=%00").status_code in (404, 422)
    job = api.post()
    worker, unit = api.reach("train")
    body = '{"progress": {"done": NaN, "total": Infinity}, "logs": [{"at": NaN, "text": "a\\u0000b"}]}'
    assert worker.tell(unit, "heartbeat", body).status_code == 200
    assert api.stage(job["id"], "train")["progress_percentage"] == 0.0
    assert [e["text"] for e in api.http.get(f"/jobs/{job['id']}/logs").json()["data"]] == ["a?b"]


def test_a_password_comes_from_a_file_and_is_never_shown(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(db_module, "START_PATIENCE_S", -1.0)
    (tmp_path / "password").write_text("swordfish\n")
    monkeypatch.setenv("AERIE_DATABASE_URL", "postgresql://someone@127.0.0.1:1/none")
    monkeypatch.setenv("AERIE_DATABASE_PASSWORD_FILE", str(tmp_path / "password"))
    settings = read_settings()
    assert settings.database.password == "swordfish"  # type: ignore[union-attr]
    with caplog.at_level(logging.DEBUG), pytest.raises(DatabaseAway) as refused:
        Database(settings.database)
    assert "127.0.0.1:1/none" in refused.value.text()
    assert "swordfish" not in refused.value.text() + caplog.text + repr(settings)


@pytest.mark.parametrize("url", ["mysql://a@b/c", "postgresql://host", "nonsense", "postgresql://u:sw0rdfish@h:port/x"])
def test_a_database_url_that_cannot_be_used_is_named_and_not_repeated(monkeypatch, url):
    monkeypatch.setenv("AERIE_DATABASE_URL", url)
    with pytest.raises(InvalidSettings, match="AERIE_DATABASE_URL") as refused:
        read_settings()
    assert "sw0rdfish" not in refused.value.text()


def a_worker(name: str) -> Worker:
    return Worker(id=name, incarnation="1", queues=[], first_seen=0, last_seen=0)


@only_postgres
def test_what_one_process_commits_rings_in_the_others(place):
    heard, work = threading.Event(), threading.Event()
    here, there = Database(place), Database(place, lambda topic: (heard.set(), topic == "work" and work.set()))
    assert heard.wait(30), "a listener says everything once when it is there"
    work.clear()
    _tell_and_fail(here)
    with here.write() as session:
        session.add(a_worker("w"))
        tell(session, "work")
    assert work.wait(30)
    here.close(), there.close()


def _tell_and_fail(db: Database) -> None:
    def fail() -> None:
        with db.write() as session:
            tell(session, "work")
            raise KeyError

    with pytest.raises(KeyError):
        fail()


@pytest.fixture
def own_postgres(tmp_path: Path) -> Any:
    """A server that a test may stop."""
    server = start(tmp_path)
    yield server
    server.close()


@pytest.mark.slow
@only_postgres
def test_a_restart_of_postgres_costs_the_requests_under_way_and_nothing_else(make_api, own_postgres):
    api = make_api(database_url=own_postgres.url)
    job = api.post()
    worker, unit = api.reach("train")
    own_postgres.kill()
    refused = api.http.get(f"/jobs/{job['id']}")
    assert (refused.status_code, refused.json()["code"]) == (503, "database.away")
    assert int(refused.headers["retry-after"]) > 0
    assert worker.beat(unit).status_code == 503
    assert api.http.get("/healthz").status_code == 200
    assert api.http.get("/readyz").json()["code"] == "api.not_ready"
    own_postgres.start()
    assert api.http.get("/readyz").status_code == 200
    assert worker.beat(unit).status_code == 200
    worker.commit(unit)
    worker.run()
    assert api.job(job["id"])["status"] == "succeeded"


@pytest.mark.slow
@only_postgres
def test_those_who_wait_outlast_a_restart_of_postgres(make_api, own_postgres, document):
    api = make_api(database_url=own_postgres.url)
    job = api.post()
    found: list[Any] = []
    lines: list[str] = []
    reading = threading.Event()

    def read() -> None:
        with api.http.stream("GET", f"/jobs/{job['id']}/events", headers={"Accept": "text/event-stream"}) as stream:
            for line in stream.iter_lines():
                lines.append(line)
                reading.set()

    waiting = threading.Thread(target=lambda: found.append(api.worker().claim(queues=["train"], wait_s=60)))
    reader = threading.Thread(target=read)
    waiting.start(), reader.start()
    assert reading.wait(30)
    own_postgres.restart()
    rest = api.worker("w2")
    while (unit := rest.claim(queues=["prep", "extract"])) is not None:
        rest.commit(unit)
    waiting.join(60)
    assert [unit.stage for unit in found] == ["train"]
    api.http.post(f"/jobs/{job['id']}/cancel")
    assert rest.tell(found[0], "fail", {"cause": "cancelled", "problem": {"code": "x"}}).status_code == 200
    reader.join(60)
    assert "event: job.cancelled" in lines


def two_replicas(make_api: Callable[..., Any]) -> list[Any]:
    """Two processes on one database, as far as one process can be two: they share nothing else but the clock."""
    first = make_api(folder="shared")
    apis = [first, make_api(folder="shared", clock=first.clock)]
    for api in apis:  # the framework builds its routes at the first request, and not safely from several threads
        api.http.get("/jobs")
        api.http.post("/jobs", json={})
        api.worker().ask(queues=["prep"])
    return apis


@pytest.mark.slow
@only_postgres
def test_two_replicas_hand_out_every_unit_once_and_count_every_event_once(make_api, document):
    one, two = two_replicas(make_api)
    jobs = [(one, two)[i % 2].post(document(f"fox{i}", data={"unit_samples": 1}))["id"] for i in range(4)]
    taken: list[tuple[str, int]] = []

    def work(number: int) -> None:
        worker = (one, two)[number % 2].worker(f"w{number}")
        while (unit := worker.claim()) is not None:
            taken.append((unit.unit_run_id, unit.fence))
            assert worker.commit(unit).status_code == 200

    for _ in range(30):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        if all(one.job(job)["status"] == "succeeded" for job in jobs):
            break
    assert all(one.job(job)["status"] == "succeeded" for job in jobs)
    assert len(taken) == len(set(taken))
    assert {fence for _, fence in taken} == {1}
    for job in jobs:
        numbers = [e["seq"] for e in two.events(job)]
        assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.slow
@only_postgres
def test_two_replicas_make_one_job_of_one_key(make_api, document):
    apis = two_replicas(make_api)
    together = threading.Barrier(8)

    def post(number: int) -> Any:
        together.wait()
        return apis[number % 2].http.post("/jobs", json=document(), headers={"Idempotency-Key": "k"})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(post, range(8)))
    assert {a.status_code for a in answers} <= {202, 409}
    assert len({a.json()["id"] for a in answers if a.status_code == 202}) == 1
    assert {a.json()["code"] for a in answers if a.status_code == 409} <= {"idempotency.in_flight"}
    assert len(apis[0].http.get("/jobs").json()["data"]) == 1


@pytest.mark.slow
@only_postgres
def test_two_jobs_of_one_name_cannot_be_posted_at_once(make_api, document):
    apis = two_replicas(make_api)
    together = threading.Barrier(8)

    def post(number: int) -> Any:
        together.wait()
        return apis[number % 2].http.post("/jobs", json=document())

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(post, range(8)))
    assert sorted(a.status_code for a in answers) == [202] + [409] * 7
    assert {a.json()["code"] for a in answers if a.status_code == 409} == {"drafter.name_in_use"}


@only_postgres
def test_a_request_that_lost_against_another_is_run_again(api, monkeypatch):
    job = api.post()
    plain, failures = JobService.cancel, []

    def meets_a_deadlock(self: JobService, job_id: str) -> Any:
        if len(failures) < 2:
            failures.append(1)
            _end_in_a_deadlock(api.house.db)
        return plain(self, job_id)

    monkeypatch.setattr(JobService, "cancel", meets_a_deadlock)
    assert api.http.post(f"/jobs/{job['id']}/cancel").json()["status"] == "cancelled"
    assert len(failures) == 2


def _end_in_a_deadlock(db: Database) -> None:
    """Lock two rows in both orders; raises what Postgres says to the one it ends."""
    with db.write() as session:
        session.add_all([a_worker("a"), a_worker("b")])
    first, second = threading.Event(), threading.Event()

    def other() -> None:
        with db.write() as session:
            session.execute(text("UPDATE workers SET last_seen = 1 WHERE id = 'b'"))
            second.set()
            first.wait(30)
            session.execute(text("SET LOCAL deadlock_timeout = '60s'"))  # so that it is us who notices
            session.execute(text("UPDATE workers SET last_seen = 1 WHERE id = 'a'"))

    thread = threading.Thread(target=other)
    try:
        with db.write() as session:
            session.execute(text("UPDATE workers SET last_seen = 1 WHERE id = 'a'"))
            thread.start()
            second.wait(30)
            first.set()
            session.execute(text("UPDATE workers SET last_seen = 1 WHERE id = 'b'"))
    finally:
        thread.join()
        with db.write() as session:
            session.execute(text("DELETE FROM workers"))


@only_postgres
def test_one_process_at_a_time_sweeps(place):
    here, there = Database(place), Database(place)
    with here.alone("reaper") as first, there.alone("reaper") as second, there.alone("other") as other:
        assert (first, second, other) == (True, False, True)
    with there.alone("reaper") as again:
        assert again
    here.close(), there.close()
