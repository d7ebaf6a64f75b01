"""Units that need SGLang go to workers that have it, and a job says when there is none."""

from __future__ import annotations

import pytest

WITH_SGLANG = ["prep", "extract", "train", "evaluate", "extract-sglang", "evaluate-sglang"]


@pytest.fixture
def job(api, document):
    """A job on SGLang whose `prepare` is done."""
    job = api.post(document("fox", verifier={"backend": "sglang"}))
    worker = api.worker("w1")
    worker.commit(worker.take())
    return job


def test_a_worker_without_sglang_gets_no_unit_that_needs_it_and_the_job_says_how_to_get_one_that_has_it(api, job):
    without = api.worker("w1").claim()

    shown = api.job(job["id"])
    assert without is None
    assert (shown["status"], shown["stage"]) == ("running", "canary")
    assert "no worker with SGLang serves queue 'extract-sglang', which canary needs" in shown["why_queued"]
    assert "make setup-sglang" in shown["why_queued"]


def test_a_worker_that_has_it_takes_the_unit(api, job):
    unit = api.worker("w2").take(queues=WITH_SGLANG)

    assert unit.stage == "canary"
    assert api.job(job["id"])["why_queued"] is None
    shown = {worker["id"]: worker["queues"] for worker in api.http.get("/workers").json()["data"]}
    assert "extract-sglang" not in shown["w1"]
    assert "extract-sglang" in shown["w2"]


def test_every_worker_takes_the_stages_that_need_no_engine(api, job):
    having = api.worker("w2")
    taken = {}
    for _ in range(12):
        if (unit := api.worker("w1").claim()) is not None:
            taken.setdefault("w1", set()).add(unit.stage)
            api.worker("w1").commit(unit)
        elif (unit := having.claim(queues=WITH_SGLANG)) is not None:
            taken.setdefault("w2", set()).add(unit.stage)
            having.commit(unit)

    assert api.job(job["id"])["status"] == "succeeded"
    assert taken == {"w1": {"vocab", "train", "package"}, "w2": {"canary", "generate", "extract", "evaluate"}}


def test_a_job_that_waits_for_sglang_holds_up_no_other(api, job, document):
    other = api.post(document("hen"))

    unit = api.worker("w1").take()

    assert unit.job_id == other["id"]


def test_what_a_running_server_gives_needs_no_sglang_on_the_worker(api, document):
    server = {"url": "http://10.0.0.7:30000"}
    asked = document("fox", verifier={"backend": "sglang", "endpoint": server}, extraction={"endpoint": server})

    planned = api.http.post("/jobs:plan", json=asked).json()

    queues = {stage["name"]: stage["queue"] for stage in planned["stages"]}
    assert (queues["generate"], queues["extract"]) == ("extract", "extract")
    assert (queues["canary"], queues["evaluate"]) == ("extract-sglang", "evaluate-sglang")


def test_a_plan_names_every_kind_of_worker_that_is_missing(api, document):
    api.worker("w1").claim(queues=["prep", "extract"])

    planned = api.http.post("/jobs:plan", json=document("fox", verifier={"backend": "sglang"})).json()

    missing = [warning for warning in planned["warnings"] if "no worker" in warning]
    assert [warning.partition("; ")[0] for warning in missing] == [
        "no worker with SGLang serves queue 'extract-sglang', which canary needs",
        "no worker serves queue 'train', which train needs",
        "no worker with SGLang serves queue 'evaluate-sglang', which evaluate needs",
    ]
    assert "make setup-sglang" in missing[0]


def test_a_plan_that_every_stage_has_a_worker_for_warns_of_none(api, document):
    api.worker("w1").claim(queues=WITH_SGLANG)

    planned = api.http.post("/jobs:plan", json=document("fox", verifier={"backend": "sglang"})).json()

    assert not [warning for warning in planned["warnings"] if "no worker" in warning]
