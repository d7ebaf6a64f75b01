"""A paused job gives out nothing, loses nothing, and goes on where it stood."""

from __future__ import annotations

import pytest


def states(api, job_id, stage):
    with api.house.db.read() as session:
        from aerie_api.leases.repository import UnitRepository

        return [u.state for u in UnitRepository(session).of_stage(job_id, stage)]


def pause(api, job):
    answer = api.http.post(f"/jobs/{job['id']}/pause")
    assert answer.status_code == 202, answer.text
    return answer.json()


def resume(api, job):
    return api.http.post(f"/jobs/{job['id']}/resume")


def test_a_paused_job_gives_out_no_unit_and_says_who_paused_it(api):
    job = api.post()
    paused = pause(api, job)
    assert (paused["status"], paused["reason"]["code"]) == ("paused", "job.paused")
    assert paused["why_queued"] == "a person paused the job"
    assert api.worker().claim() is None
    resumed = resume(api, job).json()
    assert (resumed["status"], resumed["reason"]) == ("queued", None)
    assert len(api.worker().run()) > 5
    assert api.job(job["id"])["status"] == "succeeded"


def test_what_runs_is_told_to_save_and_gives_its_place_back_without_using_up_an_attempt(make_api):
    api = make_api(max_attempts=1)
    job = api.post()
    worker, unit = api.reach("train")
    pause(api, job)
    assert worker.beat(unit).json() == {"cancel": False, "give_back": True, "lease_s": 60.0}
    assert worker.fail(unit, "preempted").status_code == 200
    assert states(api, job["id"], "train") == ["paused"]
    assert worker.claim() is None
    resume(api, job)
    again = worker.take()
    assert (again.unit_run_id, again.attempt) == (unit.unit_run_id, 2)
    worker.commit(again)
    worker.run()
    assert api.job(job["id"])["status"] == "succeeded"


@pytest.mark.parametrize("stop", ["pause", "cancel"])
def test_a_job_that_was_stopped_shows_how_far_it_had_come_until_it_goes_on(api, stop):
    job = api.post()
    worker, unit = api.reach("train")
    worker.beat(unit, progress={"done": 13, "total": 100, "unit": "steps"})
    api.http.post(f"/jobs/{job['id']}/{stop}")
    worker.fail(unit, "preempted" if stop == "pause" else "cancelled")

    stopped = api.stage(job["id"], "train")
    api.http.post(f"/jobs/{job['id']}/{'resume' if stop == 'pause' else 'retry'}")
    waiting = api.stage(job["id"], "train")
    worker.beat(worker.take(), progress={"done": 12, "total": 100, "unit": "steps"})

    assert (stopped["progress_percentage"], waiting["progress_percentage"]) == (13.0, 13.0)
    assert api.stage(job["id"], "train")["progress_percentage"] == 12.0


def test_what_finishes_in_time_counts_and_the_next_stage_waits_for_the_resumption(api):
    job = api.post()
    worker, unit = api.reach("train")
    pause(api, job)
    assert worker.commit(unit).status_code == 200
    assert states(api, job["id"], "train") == ["succeeded"]
    assert worker.claim() is None
    resume(api, job)
    assert worker.run() == ["evaluate", "evaluate", "package"]


def test_a_worker_that_dies_while_its_job_is_paused_leaves_its_unit_paused(api):
    job = api.post()
    api.reach("train")
    pause(api, job)
    api.clock.pass_(61)
    api.house.claims.reap()
    assert states(api, job["id"], "train") == ["paused"]
    api.clock.pass_(100)
    assert api.worker("w2").claim() is None
    resume(api, job)
    assert api.worker("w2").take().stage == "train"


def test_a_full_store_pauses_the_job_and_fails_nothing(make_api):
    api = make_api(max_attempts=1)
    job = api.post()
    worker, unit = api.reach("generate")
    sibling = api.worker("w2").take()
    worker.fail(unit, retryable=False, code="store.full")
    paused = api.job(job["id"])
    assert (paused["status"], paused["reason"]["code"]) == ("paused", "store.full")
    assert api.worker("w2").beat(sibling).json()["give_back"] is True
    with api.house.db.write() as session:
        from aerie_api.leases.pausing import STORE_FULL, resume_all

        assert [j.id for j in resume_all(session, STORE_FULL, api.clock(), lambda job: True)] == [job["id"]]
    api.worker("w2").commit(sibling)
    worker.run()
    assert api.job(job["id"])["status"] == "succeeded"


def test_what_a_person_paused_room_in_the_store_does_not_resume(api):
    job = api.post()
    worker, unit = api.reach("generate")
    worker.fail(unit, code="store.full")
    pause(api, job)
    with api.house.db.write() as session:
        from aerie_api.leases.pausing import STORE_FULL, resume_all

        assert resume_all(session, STORE_FULL, api.clock(), lambda job: True) == []
    assert api.job(job["id"])["reason"]["code"] == "job.paused"


def test_a_paused_job_keeps_its_name_and_can_be_cancelled(api, document):
    job = api.post()
    worker, unit = api.reach("generate")
    pause(api, job)
    assert api.http.post("/jobs", json=document()).json()["code"] == "drafter.name_in_use"
    assert api.http.post(f"/jobs/{job['id']}/cancel").json()["status"] == "cancelling"
    assert worker.beat(unit).json()["cancel"] is True
    worker.fail(unit, "cancelled")
    cancelled = api.job(job["id"])
    assert (cancelled["status"], cancelled["reason"]) == ("cancelled", None)


def test_a_failure_without_remedy_fails_a_paused_job(api):
    job = api.post()
    worker, unit = api.reach("generate")
    pause(api, job)
    worker.fail(unit, retryable=False)
    assert api.job(job["id"])["status"] == "failed"
    assert "paused" not in states(api, job["id"], "generate")


@pytest.mark.parametrize("status", ["queued", "succeeded", "cancelled"])
def test_only_living_jobs_can_be_paused_and_only_paused_ones_resumed(api, status):
    job = api.post()
    if status == "succeeded":
        api.worker().run()
    if status == "cancelled":
        api.http.post(f"/jobs/{job['id']}/cancel")
    assert resume(api, job).json()["code"] == "job.state"
    if status != "queued":
        assert api.http.post(f"/jobs/{job['id']}/pause").json()["code"] == "job.state"


def test_a_stop_is_heard_at_once_and_once(api):
    job = api.post()
    worker, unit = api.reach("generate")
    assert worker.stops() == {}
    pause(api, job)
    assert worker.stops() == {unit.unit_run_id: {"fence": 1, "cancel": False, "give_back": True, "lease_s": 60.0}}
    assert worker.stops(known={unit.unit_run_id: unit.fence}) == {}
    assert api.worker("w2").stops() == {}
    assert api.worker(incarnation="2").stops() == {}
