"""A job that failed or was cancelled stops what is under way, loses nothing that is done, and can be taken up again."""

from __future__ import annotations

import pytest


def test_a_failure_stops_the_siblings_and_keeps_what_they_finish(api):
    job = api.post()
    worker, first = api.reach("generate")
    second = api.worker("w2").take()
    worker.fail(first, retryable=False)
    assert worker.beat(second).json()["cancel"] is True
    assert worker.commit(second).status_code == 200
    assert api.job(job["id"])["status"] == "failed"
    api.http.post(f"/jobs/{job['id']}/retry")
    assert worker.run() == ["generate", "extract", "extract", "vocab", "train", "evaluate", "evaluate", "package"]


def test_a_retry_takes_up_where_the_job_stopped(api):
    job = api.post()
    worker, unit = api.reach("train")
    worker.fail(unit, retryable=False)
    answer = api.http.post(f"/jobs/{job['id']}/retry")
    assert (answer.status_code, answer.json()["status"]) == (202, "queued")
    assert answer.json()["reason"] is None
    again = worker.take()
    assert (again.stage, again.attempt, again.fence) == ("train", 1, 2)
    worker.commit(again)
    worker.run()
    assert api.job(job["id"])["status"] == "succeeded"
    assert "taken up again" in api.said(job["id"])


def test_the_time_of_a_stage_is_how_long_it_ran_and_not_how_long_its_job_stood_still(api):
    job = api.post()
    worker, unit = api.reach("train")
    api.clock.pass_(40)
    worker.fail(unit, retryable=False)
    api.clock.pass_(5000)
    assert api.stage(job["id"], "train")["seconds"] == 40
    api.http.post(f"/jobs/{job['id']}/retry")
    api.clock.pass_(300)  # until a worker is free
    again = worker.take()
    api.clock.pass_(50)
    worker.commit(again)
    assert api.stage(job["id"], "train")["seconds"] == 90
    (ended,) = [e for e in api.events(job["id"]) if e["message"] == "train: done"]
    assert ended["data"]["seconds"] == 90


def test_units_that_ran_side_by_side_are_counted_once_in_the_time_of_their_stage(api):
    job = api.post()
    worker, first = api.reach("generate")
    api.clock.pass_(10)
    second = api.worker("w2").take()
    api.clock.pass_(10)
    worker.commit(first)
    api.clock.pass_(10)
    worker.commit(second)
    assert api.stage(job["id"], "generate")["seconds"] == 30


def test_a_retry_while_a_sibling_runs_leaves_it_its_unit(api):
    job = api.post()
    worker, first = api.reach("generate")
    second = worker.take()
    worker.fail(first, retryable=False)
    assert api.http.post(f"/jobs/{job['id']}/retry").json()["status"] == "running"
    assert worker.beat(second).json()["cancel"] is False
    worker.fail(second, "cancelled")
    worker.run()
    assert api.job(job["id"])["status"] == "succeeded"


def test_a_retry_makes_again_what_is_gone_from_the_store(api):
    job = api.post()
    worker, unit = api.reach("train")
    worker.fail(unit, retryable=False, code="object.missing")
    lost = next((api.folder / "objects" / "default" / "generate" / job["id"] / "00001").glob("*out.bin"))
    lost.unlink()
    api.http.post(f"/jobs/{job['id']}/retry")
    assert "generate unit 1" in api.said(job["id"])
    assert worker.run() == ["generate", "train", "evaluate", "evaluate", "package"]
    assert api.job(job["id"])["status"] == "succeeded"


@pytest.mark.parametrize("status", ["queued", "running", "succeeded"])
def test_only_ended_jobs_can_be_retried(api, status):
    job = api.post()
    if status == "running":
        api.worker().take()
    if status == "succeeded":
        api.worker().run()
    answer = api.http.post(f"/jobs/{job['id']}/retry")
    assert (answer.status_code, answer.json()["code"]) == (409, "job.state")


def test_a_queued_job_is_cancelled_at_once(api):
    job = api.post()
    assert api.http.post(f"/jobs/{job['id']}/cancel").json()["status"] == "cancelled"
    assert api.worker().claim() is None
    assert api.http.post(f"/jobs/{job['id']}/cancel").json()["code"] == "job.state"


def test_a_running_job_is_cancelled_when_its_last_unit_has_stopped(api):
    job = api.post()
    worker, first = api.reach("generate")
    second = worker.take()
    assert api.http.post(f"/jobs/{job['id']}/cancel").json()["status"] == "cancelling"
    assert api.http.post(f"/jobs/{job['id']}/cancel").json()["status"] == "cancelling"
    assert worker.beat(first).json()["cancel"] is True
    worker.fail(first, "cancelled")
    assert api.job(job["id"])["status"] == "cancelling"
    worker.commit(second)
    assert api.job(job["id"])["status"] == "cancelled"
    assert api.unit_states(job["id"], "generate") == ["cancelled", "succeeded"]
    api.http.post(f"/jobs/{job['id']}/retry")
    assert worker.run()[:2] == ["generate", "extract"]


def test_a_stop_names_the_attempt_that_it_means_and_leaves_the_next_one_alone(api):
    job = api.post()
    worker, first = api.reach("train")
    api.http.post(f"/jobs/{job['id']}/cancel")
    known = {unit: stop["fence"] for unit, stop in worker.stops().items()}
    worker.fail(first, "cancelled")
    api.http.post(f"/jobs/{job['id']}/retry")
    again = worker.take()
    assert known == {again.unit_run_id: again.fence - 1}
    assert worker.stops() == {}
    api.http.post(f"/jobs/{job['id']}/cancel")
    assert worker.stops(known)[again.unit_run_id]["fence"] == again.fence


def test_a_cancelled_job_does_not_wait_for_a_worker_that_died(api):
    job = api.post()
    api.reach("prepare")
    api.http.post(f"/jobs/{job['id']}/cancel")
    api.clock.pass_(61)
    api.house.claims.reap()
    assert api.job(job["id"])["status"] == "cancelled"


def test_a_job_cancelled_at_its_very_last_commit_can_be_finished(api):
    job = api.post()
    worker, unit = api.reach("package")
    api.http.post(f"/jobs/{job['id']}/cancel")
    worker.commit(unit)
    assert api.job(job["id"])["status"] == "cancelled"
    assert api.http.post(f"/jobs/{job['id']}/retry").json()["status"] == "succeeded"
