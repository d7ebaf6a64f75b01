"""The same POST twice makes one job."""

from __future__ import annotations

import threading

from sqlalchemy import select

from aerie_api.tables import IdempotencyRow


def test_the_same_key_and_body_make_one_job(api, document):
    first = api.http.post("/jobs", json=document(), headers={"Idempotency-Key": "k1"})
    again = api.http.post("/jobs", json=document(), headers={"Idempotency-Key": "k1"})
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert (again.status_code, again.json(), again.headers["location"]) == (
        202,
        first.json(),
        first.headers["location"],
    )
    other = api.http.post("/jobs", json=document("hen"), headers={"Idempotency-Key": "k1"})
    assert (other.status_code, other.json()["code"]) == (422, "idempotency.mismatch")
    assert len(api.http.get("/jobs").json()["data"]) == 1


def test_a_key_is_forgotten_after_a_day_and_after_a_refusal(api, document):
    key = {"Idempotency-Key": "k1"}
    assert api.http.post("/jobs", json={**document(), "lr": 1}, headers=key).status_code == 422
    assert api.http.post("/jobs", json=document(), headers=key).status_code == 202
    api.clock.pass_(24 * 3600 + 1)
    assert api.http.post("/jobs", json=document("hen"), headers=key).status_code == 202


def test_old_keys_are_swept(api, document):
    api.http.post("/jobs", json=document(), headers={"Idempotency-Key": "k1"})
    api.house.sweep()
    assert len(kept_keys(api)) == 1
    api.clock.pass_(24 * 3600 + 1)
    api.house.sweep()
    assert kept_keys(api) == []


def kept_keys(api):
    with api.house.db.read() as session:
        return list(session.scalars(select(IdempotencyRow.key)))


def test_a_key_whose_first_request_is_at_work_answers_409(make_api, document):
    entered, leave = threading.Event(), threading.Event()
    plain = make_api().parts.preflight

    def slow(spec, roots):
        entered.set()
        assert leave.wait(30)
        return plain(spec, roots)

    api = make_api("b", preflight=slow)
    first = threading.Thread(target=lambda: api.post(Idempotency_Key="k1"))
    first.start()
    assert entered.wait(30)
    second = api.http.post("/jobs", json=document(), headers={"Idempotency-Key": "k1"})
    leave.set()
    first.join()
    assert (second.status_code, second.json()["code"]) == (409, "idempotency.in_flight")
