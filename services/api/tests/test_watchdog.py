"""A unit that gives signs of life and does not get on is ended; one whose single steps are long is not."""

from __future__ import annotations

import pytest

MINUTE = 60


@pytest.fixture
def make_patient(make_api):
    """Builds an API whose leases never end, so that one beat stands for the many of an hour."""
    return lambda *folder, **given: make_api(*folder, lease_s=1e9, **given)


@pytest.fixture
def api(make_patient):
    return make_patient()


def beat(api, worker, unit, minutes, **body):
    """Beat at the end of so much time; the answer."""
    api.clock.pass_(minutes * MINUTE)
    api.house.claims.reap()
    return worker.beat(unit, **body)


def progress(done):
    return {"progress": {"done": done, "total": 100}}


def test_a_unit_that_stands_still_is_ended_typed_and_tried_again(api):
    job = api.post()
    worker, unit = api.reach("train")
    worker.beat(unit, **progress(3))
    assert beat(api, worker, unit, 59, **progress(3)).status_code == 200

    answer = beat(api, worker, unit, 2, **progress(3))

    assert answer.json()["code"] == "lease.lost"
    api.clock.pass_(10)
    assert api.worker("w2").take().attempt == 2
    attempts = api.http.get(f"/jobs/{job['id']}/attempts").json()["data"]
    [ended] = [a for a in attempts if a["outcome"] == "failed"]
    assert ended["problem"]["code"] == "unit.stuck"
    assert "has not got on for 61 min on worker w1" in ended["problem"]["detail"]


@pytest.mark.parametrize("sign", ["progress", "metrics"])
def test_new_progress_or_a_new_value_counts_as_getting_on(api, sign):
    api.post()
    worker, unit = api.reach("train")
    for step in range(4):
        news = progress(step) if sign == "progress" else {"metrics": [{"name": "loss", "value": 1.0, "step": step}]}
        assert worker.beat(unit, **news).status_code == 200
        assert beat(api, worker, unit, 50).status_code == 200


def test_log_lines_alone_are_no_progress(api):
    api.post()
    worker, unit = api.reach("train")
    lines = {"logs": [{"at": 0, "text": "waiting for a collective"}]}
    assert beat(api, worker, unit, 50, **lines).status_code == 200
    assert beat(api, worker, unit, 12, **lines).json()["code"] == "lease.lost"


def test_an_attempt_with_long_steps_is_given_five_of_them(api):
    api.post()
    worker, unit = api.reach("train")
    beat(api, worker, unit, 50)
    worker.beat(unit, **progress(1))
    assert beat(api, worker, unit, 240, **progress(1)).status_code == 200
    assert beat(api, worker, unit, 12, **progress(1)).json()["code"] == "lease.lost"


def test_a_unit_that_hangs_every_time_fails_its_job(make_patient):
    api = make_patient(max_attempts=2)
    job = api.post()
    for worker in (api.worker(), api.worker("w2")):
        unit = worker.take()
        assert beat(api, worker, unit, 32).json()["code"] == "lease.lost"
        api.clock.pass_(60)
    failed = api.job(job["id"])
    assert (failed["status"], failed["reason"]["code"]) == ("failed", "unit.stuck")


def test_the_absence_of_the_api_is_not_held_against_a_unit(make_patient):
    api = make_patient()
    api.post()
    worker, unit = api.reach("train")
    api.__exit__()
    api.clock.pass_(300 * MINUTE)
    again = make_patient(clock=api.clock)
    worker.api = again
    again.house.claims.reap()
    assert beat(again, worker, unit, 30).status_code == 200


def test_the_operator_may_wait_longer_or_for_ever(make_patient):
    for factor, minutes, patient in ((2.0, 110, True), (2.0, 130, False), (0.0, 600, True)):
        api = make_patient(f"{factor}-{minutes}", stuck_factor=factor)
        api.post()
        worker, unit = api.reach("train")
        assert (beat(api, worker, unit, minutes).status_code == 200) is patient
