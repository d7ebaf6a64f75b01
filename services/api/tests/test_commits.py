"""What a worker commits is checked, kept once under its key, and serves every later job that asks for the same."""

from __future__ import annotations

import pytest

from aerie_api.leases.repository import CommitRepository
from eagle3_core.objects.protocol import StoreUnavailable


def test_a_second_job_on_the_same_data_reuses_what_it_can(api, document):
    first = api.post()
    api.worker().run()
    second = api.post(document("hen", training={"epochs": 9}))
    assert "extract: 2 of 2 units reused from job " + first["id"] in api.said(second["id"])
    assert api.stage(second["id"], "extract")["reused"] is True
    assert api.stage(second["id"], "extract")["reused_from"] == [first["id"]]
    ran = api.worker().run()
    assert "generate" not in ran
    assert ran == ["train", "evaluate", "evaluate", "package"]


def test_states_kept_while_generating_serve_extract(api):
    job = api.post()
    ran = api.worker().run(also=True)
    assert "extract" not in ran
    assert api.stage(job["id"], "extract")["reused_from"] == [job["id"]]
    assert api.job(job["id"])["status"] == "succeeded"


def test_a_store_that_is_away_while_a_known_result_is_looked_up_fails_no_job(api, document, monkeypatch):
    first = api.post()
    api.worker().run()

    def away(key: str) -> None:
        raise StoreUnavailable(f"{key}: 503", remedy="ask again")

    with monkeypatch.context() as while_away:
        while_away.setattr(api.house.store, "stat", away)
        refused = api.http.post("/jobs", json=document("hen", training={"epochs": 9}))
    assert (refused.status_code, refused.json()["code"]) == (503, "store.unavailable")
    assert [job["name"] for job in api.http.get("/jobs").json()["data"]] == [first["name"]]

    second = api.post(document("hen", training={"epochs": 9}))
    assert api.stage(second["id"], "extract")["reused_from"] == [first["id"]]


def test_the_same_job_under_another_name_only_packages_again(api, document):
    first = api.post()
    api.worker().run()
    twin = api.post(document("twin"))
    assert [s["name"] for s in twin["stages"] if not s["reused"]] == ["package"]
    assert twin["stages"][5]["reused_from"] == [first["id"]]
    assert api.worker().run() == ["package"]
    assert api.job(twin["id"])["status"] == "succeeded"


def test_a_cached_result_whose_objects_are_gone_is_made_again(api, document):
    job = api.post()
    api.worker().run()
    lost = next((api.folder / "objects" / "default" / "vocab" / job["id"]).rglob("*out.bin"))
    lost.unlink()
    api.post(document("hen"))
    assert api.worker().run() == ["vocab", "package"]


def test_the_first_result_under_a_key_wins(api, document):
    api.post()
    second = api.post(document("hen"))
    one, unit = api.reach("prepare")
    two = api.worker("w2")
    other = two.take()
    assert (unit.key, unit.job_id) != (other.key, other.job_id)
    assert unit.key == other.key
    one.commit(unit, content="first")
    two.commit(other, content="second")
    with api.house.db.read() as session:
        assert CommitRepository(session, "default").find([unit.key])[unit.key].job_id == unit.job_id
    assert api.job(second["id"])["status"] == "running"


@pytest.mark.parametrize("change", ["key", "also", "missing", "stage"])
def test_a_commit_of_what_is_not_there_or_not_the_units_is_refused(api, change):
    api.post()
    worker, unit = api.reach("generate")
    made = worker.made(unit, also=True).model_dump(mode="json")
    if change == "key":
        made["output"]["key"] = "0" * 64
    if change == "also":
        made["also"][0]["key"] = "0" * 64
    if change == "missing":
        made["output"]["manifest"]["key"] += "x"
    if change == "stage":
        made["also"][0]["stage"] = "vocab"
    answer = worker.tell(unit, "commit", made)
    assert (answer.status_code, answer.json()["code"]) == (422, "commit.refused")
    assert worker.commit(unit, also=True).status_code == 200


def test_a_companion_under_a_key_that_nobody_will_look_for_is_refused(api):
    api.post()
    worker, unit = api.reach("generate")
    other = worker.take()
    mixed, theirs = worker.made(unit), worker.made(other, also=True).also[0]
    mixed.also = [worker._output(unit, "extract", theirs.key, theirs.result, "")]
    answer = worker.commit(unit, mixed)
    assert answer.json()["code"] == "commit.refused"
    assert "will be looked for under" in answer.json()["detail"]
    mixed.also = [theirs]
    answer = worker.commit(unit, mixed)
    assert answer.json()["code"] == "commit.refused"
    assert "not of this attempt" in answer.json()["detail"]


def test_a_result_with_nan_is_refused_and_the_unit_goes_on(api):
    api.post()
    worker, unit = api.reach("prepare")
    made = worker.made(unit)
    body = made.model_dump_json().replace('"samples":4', '"samples":NaN')
    assert worker.tell(unit, "commit", body).json()["code"] == "commit.refused"
    assert worker.commit(unit, made).status_code == 200
