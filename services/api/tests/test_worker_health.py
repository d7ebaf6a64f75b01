"""A worker that fails unit after unit is set aside, said, and let back in by a person; a broken job sets nobody aside."""

from __future__ import annotations

import pytest


def fail_next(api, worker, times=1, **failure):
    """Let `worker` fail the next units it gets; whose they were."""
    jobs = []
    for _ in range(times):
        api.clock.pass_(100)
        unit = worker.take()
        worker.fail(unit, **failure)
        jobs.append(unit.job_id)
    return jobs


@pytest.fixture
def jobs(make_api, document):
    """An API with five jobs whose units are tried often."""
    api = make_api(max_attempts=50)
    for name in ("fox", "hen", "owl", "bat", "cat"):
        api.post(document(name))
    return api


@pytest.fixture
def aside(jobs):
    """The same, with its worker set aside."""
    fail_three_units(jobs, jobs.worker())
    return jobs


def fail_three_units(api, worker):
    """Fail a unit of three jobs each: all are held at once, as by a machine with three GPUs."""
    for unit in [worker.take(), worker.take(), worker.take()]:
        assert worker.fail(unit).status_code == 200


def test_a_worker_that_fails_units_of_several_jobs_is_told_not_to_claim(aside):
    answer = aside.worker().ask()
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (409, "worker.set_aside")
    assert "failed 3 units in a row, the last with: it broke" in problem["detail"]
    assert "POST /workers/w1/readmit" in problem["remedy"]


def test_its_units_go_to_others_and_the_queue_says_why_it_waits(aside):
    job = aside.http.get("/jobs").json()["data"][0]
    assert "w1 set aside after failing unit after unit" in job["why_queued"]
    aside.clock.pass_(100)
    assert aside.worker("w2").run(limit=500)
    assert {j["status"] for j in aside.http.get("/jobs").json()["data"]} == {"succeeded"}


def test_the_fleet_is_shown_and_the_worker_readmitted(aside):
    aside.clock.pass_(100)
    busy = aside.worker("w2").take()
    shown = {w["id"]: w for w in aside.http.get("/workers").json()["data"]}
    assert (shown["w1"]["state"], shown["w1"]["reason"]["code"]) == ("set_aside", "worker.set_aside")
    assert (shown["w2"]["state"], shown["w2"]["unit"]["job"]) == ("busy", busy.job_id)

    back = aside.http.post("/workers/w1/readmit").json()

    assert (back["state"], back["reason"]) == ("waiting", None)
    assert aside.worker().take()
    aside.clock.pass_(1000)
    assert {w["state"] for w in aside.http.get("/workers").json()["data"]} <= {"busy", "silent"}
    assert aside.http.post("/workers/nobody/readmit").json()["code"] == "worker.missing"


def test_old_failures_are_forgotten_with_the_readmission(aside):
    aside.http.post("/workers/w1/readmit")
    fail_next(aside, aside.worker(), 2)
    assert aside.worker().ask().status_code in (200, 204)


def test_one_broken_job_sets_nobody_aside(make_api):
    api = make_api(max_attempts=50)
    api.post()
    worker, first = api.reach("generate")
    second = worker.take()
    worker.fail(first)
    worker.fail(second)
    fail_next(api, worker, 6)
    api.clock.pass_(100)
    assert worker.ask().status_code == 200


def test_a_worker_that_alone_fails_what_others_do_is_set_aside(make_api, document):
    api = make_api(max_attempts=50)
    api.post(document(data={"unit_samples": 1}))
    bad, unit = api.reach("generate")
    held = [unit, bad.take(), bad.take()]
    good = api.worker("w2")
    good.commit(good.take())
    for unit in held:
        bad.fail(unit)
    assert bad.ask().json()["code"] == "worker.set_aside"
    assert "worker w1 failed 3 units in a row" in api.said(unit.job_id)


def test_a_commit_between_or_the_same_unit_again_is_no_streak(jobs):
    worker = jobs.worker()
    fail_next(jobs, worker, 2)
    jobs.clock.pass_(100)
    worker.commit(worker.take())
    fail_next(jobs, worker, 2)
    assert worker.ask().status_code in (200, 204)


@pytest.mark.parametrize("failure", [{"cause": "preempted"}, {"cause": "worker_lost"}, {"retryable": False}])
def test_what_says_nothing_about_the_worker_is_not_held_against_it(jobs, failure):
    worker = jobs.worker()
    for unit in [worker.take(), worker.take(), worker.take(), worker.take()]:
        worker.fail(unit, **failure)
    jobs.clock.pass_(100)
    assert worker.ask().status_code == 200
