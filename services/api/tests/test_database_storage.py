"""A database whose disk is full or whose file cannot be written is said to be just that, and works again when it can."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from aerie_api.db import Database


@pytest.fixture
def sqlite(api: Any) -> Any:
    if api.house.db.shared:
        pytest.skip("Postgres reports its disk by itself")
    return api


@contextmanager
def set_to(db: Database, pragma: str) -> Iterator[None]:
    """Every transaction of `db` begins with `pragma`."""

    def begin(connection: Any) -> None:
        connection.exec_driver_sql(f"PRAGMA {pragma}")

    event.listen(db.engine, "begin", begin)
    yield
    event.remove(db.engine, "begin", begin)


@pytest.mark.parametrize(
    ("pragma", "undo", "says"),
    [
        ("max_page_count = 1", f"max_page_count = {1 << 30}", "its disk is full"),
        ("query_only = 1", "query_only = 0", "no longer be written"),
    ],
)
def test_a_post_that_the_disk_does_not_take_is_refused_by_name_and_taken_later(sqlite, document, pragma, undo, says):
    with set_to(sqlite.house.db, pragma):
        answers = [sqlite.http.post("/jobs", json=document(f"fox-{i}", metadata={"a": "x" * 512})) for i in range(40)]

    assert {answer.json()["code"] for answer in answers if answer.status_code != 202} == {"database.storage"}
    refused = answers[-1]
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "2")
    assert says in refused.json()["detail"]
    with set_to(sqlite.house.db, undo):
        assert sqlite.post(document("owl"))["status"] == "queued"


def delete(place: Path) -> None:
    place.unlink()


def replace(place: Path) -> None:
    shutil.copy(place, place.with_suffix(".copy"))
    place.with_suffix(".copy").replace(place)


@pytest.mark.parametrize("lose", [delete, replace])
def test_nothing_is_confirmed_once_the_file_is_not_the_one_that_was_opened(sqlite, document, lose):
    sqlite.post(document("fox"))
    lose(sqlite.house.settings.data_dir / "aerie.db")

    answers = [
        sqlite.http.post("/jobs", json=document("owl")), sqlite.http.get("/jobs"),
        sqlite.worker().ask(),
    ]  # fmt: skip

    assert {(answer.status_code, answer.json()["code"]) for answer in answers} == {(503, "database.storage")}
    assert "moved away or deleted" in answers[0].json()["detail"]
    ready = sqlite.http.get("/readyz")
    assert (ready.status_code, "moved away" in ready.json()["detail"]) == (503, True)
