"""A tenant's own limit of stored bytes: where it is looked at, who waits for it, and what lets them go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from people import admin, tenant

from aerie_api.leases.reaper import Reaper

STATES_BYTES = 1 << 20
ENOUGH = 1 << 21


def says(stage: str, _spec: Any, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Results that say what the hidden states will need: much before the answers are there, and little then."""
    need = {"verifier": {"hidden_size": 8}, "states_bytes": STATES_BYTES, "states_bytes_least": STATES_BYTES}
    more = {"prepare": need, "generate": {"samples": 4, "tokens": 40, "answer_tokens": 8}}
    return {**results[0], **more.get(stage, {})}


@pytest.fixture
def house(make_api: Callable[..., Any]) -> Any:
    """An API with keys, with one attempt for every unit, whose tenant blue has no limit."""
    return make_api(keys_required=True, reduce=says, max_attempts=1, room_bytes=0, collect_grace_s=0.0)


class Red:
    """A tenant with a limit of its own."""

    def __init__(self, api: Any, store_bytes: int) -> None:
        self.api, self.headers = api, tenant(api, "red", store_bytes=store_bytes)

    def post(self, document: dict[str, Any]) -> str:
        answer = self.api.http.post("/jobs", json=document, headers=self.headers)
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    def job(self, job_id: str) -> dict[str, Any]:
        return self.api.http.get(f"/jobs/{job_id}", headers=self.headers).json()

    def told(self, job_id: str) -> tuple[str, str | None]:
        shown = self.job(job_id)
        return shown["status"], (shown["reason"] or {}).get("code")

    def limited(self, store_bytes: int | None) -> None:
        body = {"store_bytes": store_bytes}
        assert self.api.http.patch("/tenants/red", json=body, headers=admin(self.api)).status_code == 200

    @property
    def held(self) -> int:
        return self.api.http.get("/me", headers=self.headers).json()["tenant"]["usage"]["store_bytes"]


def test_states_that_do_not_fit_are_not_begun_and_the_job_waits_until_the_limit_is_raised(house, document):
    red = Red(house, STATES_BYTES)
    job = red.post(document())

    ran = house.worker().run()
    house.house.storage.room.watch()

    assert (ran, red.told(job)) == (["prepare"], ("paused", "store.full"))
    shown = red.job(job)
    assert shown["reason"]["context"] == {
        "held_bytes": red.held, "budget_bytes": STATES_BYTES, "needed_bytes": STATES_BYTES,
    }  # fmt: skip
    assert shown["why_queued"] == shown["reason"]["detail"]
    assert "aerie tenants limit red --store-bytes" in shown["reason"]["remedy"]
    red.limited(ENOUGH)
    house.house.storage.room.watch()
    assert red.told(job) == ("queued", None)
    house.worker().run()
    assert red.told(job) == ("succeeded", None)


def test_a_post_of_a_tenant_that_holds_too_much_is_taken_and_waits_and_nobody_elses_does(house, document):
    red, blue = Red(house, ENOUGH), tenant(house, "blue")
    first = red.post(document())
    house.worker().run()
    assert red.told(first) == ("succeeded", None)
    red.limited(red.held - 1)

    second = red.post(document("hen", datasets=[{"uri": "file:///data/other.jsonl"}], data={"max_seq_len": 64}))
    others = house.http.post("/jobs", json=document(), headers=blue).json()

    assert red.told(second) == ("paused", "store.full")
    assert others["status"] == "queued"
    assert {unit.job_id for _ in range(2) if (unit := house.worker().claim())} == {others["id"]}


def test_what_others_have_made_already_needs_no_room(house, document):
    red = Red(house, ENOUGH)
    red.post(document())
    house.worker().run()
    red.limited(red.held)

    again = red.post(document("hen", training={"epochs": 7}))

    assert red.told(again) == ("queued", None), "tokens and states are there: only training is left to run"
    assert house.worker().take().stage == "train"


def test_a_limit_reached_in_the_midst_of_a_stage_is_seen_at_the_commit(house, document, monkeypatch):
    looks = threading.Event()
    monkeypatch.setattr(house.house.room_keeper, "hint", looks.set)
    red = Red(house, ENOUGH)
    job = red.post(document())
    worker, unit = house.reach("extract")
    with house.house.db.write() as session:
        from aerie_api.tables import Tenant

        session.get_one(Tenant, "red").store_bytes = 1

    assert worker.commit(unit).status_code == 200

    assert looks.is_set()
    house.house.storage.room.watch()
    assert red.told(job) == ("paused", "store.full")
    red.limited(None)
    house.house.storage.room.watch()
    house.worker().run()
    assert red.told(job) == ("succeeded", None)
    assert {e["outcome"] for e in house.http.get(f"/jobs/{job}/attempts", headers=red.headers).json()["data"]} == {
        "committed"
    }


def test_idle_states_make_room_for_states_that_fit_without_them(house, document):
    red, worker = Red(house, ENOUGH), house.worker()
    red.post(document())
    while (unit := worker.claim()) is not None:
        worker.commit(unit, content="x" * 1000 * (unit.stage == "extract"))
    idle = house.http.get("/storage", headers=red.headers).json()["by_stage"]["extract"]
    red.limited(red.held - idle + STATES_BYTES + 500)
    job = red.post(document("hen", data={"max_seq_len": 64}))
    assert (worker.run(), red.told(job)) == (["prepare"], ("paused", "store.full"))

    house.house.storage.room.watch()

    assert red.told(job) == ("queued", None)
    assert "extract" not in house.http.get("/storage", headers=red.headers).json()["by_stage"]
    worker.run()
    assert red.told(job) == ("succeeded", None)


def test_idle_states_stay_where_letting_them_go_would_not_help(house, document):
    red = Red(house, ENOUGH)
    red.post(document())
    house.worker().run()
    red.limited(STATES_BYTES - 1)
    job = red.post(document("hen", data={"max_seq_len": 64}))
    house.worker().run()

    house.house.storage.room.watch()

    assert red.told(job) == ("paused", "store.full")
    assert "extract" in house.http.get("/storage", headers=red.headers).json()["by_stage"]


def test_a_limit_of_the_tenants_own_goes_before_everybodys(make_api):
    api = make_api(tenant_store_bytes=1000)
    assert api.http.get("/storage").json()["budget_bytes"] == 1000

    api.http.patch("/tenants/default", json={"store_bytes": 5})

    assert api.http.get("/storage").json()["budget_bytes"] == 5


def test_a_hint_brings_the_next_look_forward():
    looked = threading.Event()
    reaper = Reaper(looked.set, interval_s=3600.0)
    reaper.start()

    reaper.hint()

    assert looked.wait(60)
    reaper.stop()
    assert not reaper.alive
