"""Who may write to a unit, and what becomes of units whose workers die, fail or are told to stop."""

from __future__ import annotations

import pytest

from aerie_api.house import House
from aerie_api.jobs.idempotency import IN_FLIGHT_S


def test_a_worker_that_lost_its_lease_commits_nothing(api):
    job = api.post()
    slow, unit = api.reach("prepare")
    late = slow.made(unit)
    api.clock.pass_(61)
    api.house.claims.reap()
    api.clock.pass_(60)
    quick = api.worker("w2")
    again = quick.take()

    answer = slow.commit(unit, late)

    assert (answer.status_code, answer.json()["code"]) == (409, "lease.lost")
    assert (again.unit_run_id, again.fence, again.attempt) == (unit.unit_run_id, unit.fence + 1, 2)
    assert api.unit_states(job["id"], "prepare") == ["running"]
    for what, body in (("heartbeat", {}), ("fail", {"cause": "failed", "problem": {}})):
        assert slow.tell(unit, what, body).json()["code"] == "lease.lost"
    assert quick.commit(again).status_code == 200


def test_a_commit_said_twice_counts_once(api):
    job = api.post()
    worker, unit = api.reach("prepare")
    made = worker.made(unit)
    assert worker.commit(unit, made).status_code == 200
    events = api.events(job["id"])
    assert worker.commit(unit, made).status_code == 200
    assert api.events(job["id"]) == events
    other = worker.commit(unit, worker.made(unit, content="something else"))
    assert (other.status_code, other.json()["code"]) == (409, "lease.lost")


def test_a_token_of_another_unit_is_not_accepted(api):
    api.post()
    worker, first = api.reach("generate")
    second = worker.take()
    answer = worker.tell(first, "heartbeat", {}, token=second.token)
    assert (answer.status_code, answer.json()["code"]) == (401, "worker.unauthorised")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert api.http.post(f"/internal/v1/units/{first.unit_run_id}/heartbeat", json={}).status_code == 401


def test_claiming_takes_the_worker_token(api):
    api.post()
    assert api.worker().ask(token="wrong").json()["code"] == "worker.unauthorised"
    assert api.http.post("/internal/v1/claim", json={}).json()["code"] in ("worker.unauthorised", "request.invalid")


def test_tokens_are_not_stored(api):
    api.post()
    _, unit = api.reach("prepare")
    stored = api.stored()
    assert unit.token not in stored
    assert unit.unit_run_id in stored


def test_a_silent_worker_loses_its_unit_to_another(api):
    job = api.post()
    api.reach("prepare")
    api.clock.pass_(59)
    api.house.claims.reap()
    assert api.stage(job["id"], "prepare")["state"] == "running"
    api.clock.pass_(2)
    api.house.claims.reap()
    assert "silent for 61 s" in api.said(job["id"])
    assert api.worker("w2").claim() is None, "it is tried again only after a pause"
    api.clock.pass_(10)
    assert api.worker("w2").take().attempt == 2


def test_heartbeats_keep_a_unit(api):
    api.post()
    worker, unit = api.reach("prepare")
    for _ in range(5):
        api.clock.pass_(50)
        answer = worker.beat(unit)
        api.house.claims.reap()
        assert answer.json() == {"cancel": False, "give_back": False, "lease_s": 60.0}


def test_the_holder_of_the_newest_fence_may_report_late_if_nobody_took_the_unit(api):
    api.post()
    worker, unit = api.reach("prepare")
    api.clock.pass_(500)
    assert worker.beat(unit).status_code == 200
    api.house.claims.reap()
    assert worker.commit(unit).status_code == 200


def test_the_absence_of_the_api_costs_no_worker_its_unit(make_api):
    api = make_api()
    api.post()
    worker, unit = api.reach("prepare")
    api.__exit__()
    api.clock.pass_(1000)
    again = make_api(clock=api.clock)
    again.house.claims.reap()
    worker.api = again
    assert worker.commit(unit).status_code == 200


def test_a_worker_that_was_started_again_frees_what_it_held(api):
    job = api.post()
    _, unit = api.reach("prepare")
    again = api.worker(incarnation="2").take()
    assert (again.unit_run_id, again.attempt, again.fence) == (unit.unit_run_id, 2, unit.fence + 1)
    attempts = api.http.get(f"/jobs/{job['id']}/attempts").json()["data"]
    assert [(a["attempt"], a["outcome"]) for a in attempts] == [(1, "worker_lost"), (2, None)]
    assert "was started again" in attempts[0]["problem"]["detail"]


def test_a_unit_that_loses_every_worker_fails_its_job(make_api):
    api = make_api(max_losses=3)
    job = api.post()
    for incarnation in "123":
        api.worker(incarnation=incarnation).take()
    assert api.worker(incarnation="4").claim() is None
    failed = api.job(job["id"])
    assert (failed["status"], failed["reason"]["code"]) == ("failed", "unit.worker_lost")
    assert failed["reason"]["remedy"]


def test_pre_emption_is_free_and_at_once(api):
    job = api.post()
    worker = api.worker()
    for attempt in range(1, 20):
        unit = worker.take()
        assert unit.attempt == attempt
        assert worker.fail(unit, "preempted").status_code == 200
    assert api.job(job["id"])["status"] == "running"


def test_what_cannot_be_mended_fails_at_once(api):
    job = api.post()
    worker, unit = api.reach("prepare")
    worker.fail(unit, retryable=False, code="dataset.empty")
    failed = api.job(job["id"])
    assert (failed["status"], failed["reason"]["code"], failed["reason"]["detail"]) == (
        "failed",
        "dataset.empty",
        "it broke",
    )
    assert api.stage(job["id"], "prepare")["reason"]["code"] == "dataset.empty"
    assert worker.claim() is None


def test_what_may_pass_is_tried_three_times_with_growing_pauses(api):
    job = api.post()
    worker = api.worker()
    worker.fail(worker.take())
    api.clock.pass_(9)
    assert worker.claim() is None
    api.clock.pass_(1)
    worker.fail(worker.take())
    api.clock.pass_(19)
    assert worker.claim() is None
    api.clock.pass_(1)
    worker.fail(worker.take())
    assert api.job(job["id"])["status"] == "failed"


@pytest.mark.parametrize(
    "problem",
    [
        '{"code": "x", "detail": "\\ud800"}',
        '{"code": "x", "n": NaN}',
        '{"code": "x", "detail": {"not": "text"}}',
        '{"detail": "no code"}',
        '{"code": "x", "detail": "' + "y" * 70_000 + '"}',
    ],
)
def test_a_problem_that_cannot_be_kept_still_ends_the_attempt(api, problem):
    job = api.post()
    worker, unit = api.reach("prepare")
    body = f'{{"cause": "failed", "retryable": false, "problem": {problem}}}'
    assert worker.tell(unit, "fail", body).status_code == 200
    # A half surrogate pair is made harmless and the rest of the problem kept; what is no problem document is replaced.
    assert api.job(job["id"])["reason"]["code"] == ("x" if "ud800" in problem else "unit.failed")


def test_workers_get_only_what_their_queues_hold(api):
    api.post()
    assert api.worker().claim(queues=["train"]) is None
    assert api.worker().take(queues=["prep", "train"]).stage == "prepare"
    assert api.worker().ask(queues=["nope"]).status_code == 422


def test_the_older_job_is_served_first(api, document):
    first, _ = api.post(), api.post(document("hen"))
    assert api.worker().take().job_id == first["id"]


def test_a_house_opens_where_an_earlier_one_died_in_a_request(make_api, document):
    api = make_api()
    house: House = api.house
    house.idempotency.begin("default", "k1", b"{}")
    api.__exit__()
    again = make_api(clock=api.clock)
    if again.house.db.shared:  # another process may still be at work on it, for a while
        assert again.http.post("/jobs", json=document(), headers={"Idempotency-Key": "k1"}).status_code == 422
        api.clock.pass_(IN_FLIGHT_S + 1)
    assert again.http.post("/jobs", json=document(), headers={"Idempotency-Key": "k1"}).status_code == 202
