"""Database and store come back together: on SQLite and on Postgres by its own programs, from one real bucket into another."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import s3
from servers.postgres import Postgres, install

from aerie_api import backup
from aerie_api.__main__ import main
from eagle3_core.objects.keys import owner_of
from eagle3_core.objects.s3 import S3Store, s3_store


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.S3Server]:
    """A real S3 server."""
    server = s3.start(s3.kinds()[0], tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


class Site:
    """A place where a house can be: a database, a prefix of a bucket; and what the commands say when they run there."""

    def __init__(self, server: s3.S3Server, folder: Path, database_url: str, capsys: Any, patch: Any) -> None:
        self.folder, self.database_url = folder, database_url
        self.place = server.url(f"test-{secrets.token_hex(8)}")
        self.store: S3Store = s3_store(self.place, server.environment)
        self._environment, self._capsys, self._patch = server.environment, capsys, patch

    def command(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Run `python -m aerie_api ...` with the environment of this place; exit status and what it printed."""
        told = {
            **self._environment, "AERIE_DATABASE_URL": self.database_url, "AERIE_STORE": self.place,
            "AERIE_DATA_DIR": str(self.folder / "data"), "AERIE_RUN_DIR": str(self.folder / "run"),
            "PATH": f"{install()}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        with self._patch.context() as patch:
            for name, value in told.items():
                patch.setenv(name, value)
            self._capsys.readouterr()
            status = main(list(arguments))
        return status, json.loads(self._capsys.readouterr().out)

    def held(self) -> set[str]:
        return {stat.key for stat in self.store.list("") if owner_of(stat.key)}


@pytest.fixture
def site(
    server: s3.S3Server, database: Callable[[str], str], request: pytest.FixtureRequest, tmp_path: Path, capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Site]]:  # fmt: skip
    """Makes places; what is restored into has an empty database."""
    made: list[str] = []

    def make(folder: str, *, empty: bool = False) -> Site:
        url = database(folder)
        if empty and url:
            postgres: Postgres = request.getfixturevalue("postgres")
            made.append(url := postgres.database())
        return Site(server, tmp_path / folder, url, capsys, monkeypatch)

    yield make
    for url in made:
        request.getfixturevalue("postgres").drop(url)


@pytest.fixture
def vault(server: s3.S3Server) -> str:
    """Where backups go."""
    return server.url(f"vault-{secrets.token_hex(8)}")


def test_a_house_that_is_lost_whole_goes_on_from_its_backup(
    make_api: Callable[..., Any], site: Callable[..., Site], vault: str
):
    here, there = site("a"), site("b", empty=True)
    old = make_api("a", store=here.store)
    job = old.post()["id"]
    old.house.storage.keep_order()
    _, running = old.reach("train")

    status, made = here.command("backup", vault)
    assert (status, made["damaged"], made["objects"]) == (0, [], len(here.held()))
    old.worker().made(running)  # what comes after the backup is lost with the house

    status, brought = there.command("restore", vault)
    assert (status, brought["lost"], brought["objects"]) == (0, [], made["objects"])
    new = make_api("b", store=there.store, database_url=there.database_url)

    assert new.job(job)["status"] == "running"
    assert [s["state"] for s in new.job(job)["stages"]][:5] == ["succeeded"] * 5
    assert new.worker(incarnation="2").run() == ["train", "evaluate", "evaluate", "package"]
    assert new.job(job)["status"] == "succeeded"
    new.house.storage.keep_order()  # the store is its own: it carries the database's name
    assert there.held() >= {f.key for f in there.store.list("default/package/")}


def test_a_second_backup_copies_what_is_new_and_either_can_be_restored(
    make_api: Callable[..., Any], site: Callable[..., Site], vault: str, server: s3.S3Server, monkeypatch: Any
):
    within_a_second = iter(f"20260101T000000Z-{nonce}" for nonce in ("f" * 8, "0" * 8))  # the newer one sorts first
    monkeypatch.setattr(backup, "_new_name", within_a_second.__next__)
    here = site("a")
    api = make_api("a", store=here.store)
    job = api.post()["id"]
    api.reach("train")
    _, first = here.command("backup", vault)
    api.worker(incarnation="2").run()
    _, second = here.command("backup", vault)
    kept = {stat.key for stat in s3_store(vault, server.environment).list("objects/")}

    there, later = site("b", empty=True), site("c", empty=True)
    assert there.command("restore", vault, "--id", first["id"])[1]["backup"] == first
    assert later.command("restore", vault)[1]["backup"] == second

    assert kept == {f"objects/{key}" for key in here.held()}
    assert first["objects"] < second["objects"] == len(kept)
    before = make_api("b", store=there.store, database_url=there.database_url)
    after = make_api("c", store=later.store, database_url=later.database_url)
    assert (before.job(job)["status"], after.job(job)["status"]) == ("running", "succeeded")


def test_what_is_damaged_is_told_when_it_is_saved_and_when_it_is_brought_back(
    make_api: Callable[..., Any], site: Callable[..., Site], vault: str
):
    here, there = site("a"), site("b", empty=True)
    api = make_api("a", store=here.store)
    api.post()
    api.worker().run()
    broken = next(key for key in sorted(here.held()) if "/train/" in key and key.endswith("out.bin"))
    here.store.put_bytes(broken, b"not what its key says")

    status, made = here.command("backup", vault)
    assert (status, made["damaged"]) == (1, [broken])
    status, brought = there.command("restore", vault)

    assert status == 1
    assert [key.split("/")[1] for key in brought["lost"]] == ["train"]


def test_nothing_that_is_there_is_restored_over(make_api: Callable[..., Any], site: Callable[..., Site], vault: str):
    here, there = site("a"), site("b", empty=True)
    api = make_api("a", store=here.store)
    api.house.storage.keep_order()
    assert here.command("restore", vault)[1]["code"] == "backup.missing"
    assert here.command("backup", vault)[0] == 0

    assert here.command("restore", vault)[1]["code"] == "backup.not_empty"
    there.store.put_bytes("_aerie/owner/somebody", b"")
    status, refused = there.command("restore", vault)

    assert (status, refused["code"]) == (2, "storage.owner")
    assert there.held() == set()


def test_half_a_backup_is_none(
    make_api: Callable[..., Any], site: Callable[..., Site], vault: str, server: s3.S3Server
):
    here, there = site("a"), site("b", empty=True)
    make_api("a", store=here.store)
    made = here.command("backup", vault)[1]
    s3_store(vault, server.environment).delete(f"backups/{made['id']}/backup.json")

    assert there.command("restore", vault)[1]["code"] == "backup.missing"
