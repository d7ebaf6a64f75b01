"""How far a stage is and when it will be done, as its document says."""

import pytest


def test_progress_pace_and_estimates_come_from_heartbeats(api):
    job = api.post()
    worker, unit = api.reach("generate")
    api.clock.pass_(10)
    worker.beat(unit, progress={"done": 1, "total": 2, "unit": "samples", "rate_per_s": 0.1, "note": "decoding"})
    stage = api.stage(job["id"], "generate")
    assert stage["progress_percentage"] == 25.0
    assert (stage["note"], stage["rate"], stage["rate_unit"]) == ("decoding", 0.1, "samples")
    assert stage["estimated_remaining_seconds"] == 30.0
    assert stage["shards"] == {"done": 0, "total": 2}
    assert stage["workers"] == ["w1"]


def test_what_a_unit_loaded_before_it_began_is_not_taken_for_its_pace(api):
    job = api.post()
    worker, unit = api.reach("generate")
    api.clock.pass_(60)
    worker.beat(unit, progress={"done": 10, "total": 100, "unit": "samples", "rate_per_s": 10})
    assert api.stage(job["id"], "generate")["estimated_remaining_seconds"] == 9 + 10


@pytest.mark.parametrize("rate", [None, 0, 1e-300, -1])
def test_without_a_rate_the_pace_so_far_tells_what_remains(api, rate):
    job = api.post()
    worker, unit = api.reach("generate")
    api.clock.pass_(60)
    worker.beat(unit, progress={"done": 10, "total": 100, "unit": "samples", "rate_per_s": rate})
    assert api.stage(job["id"], "generate")["estimated_remaining_seconds"] == pytest.approx(60 * 0.95 / 0.05)


def test_nothing_is_estimated_from_parts_of_unlike_length(api):
    job = api.post()
    worker, unit = api.reach("canary")
    api.clock.pass_(10)
    worker.beat(unit, progress={"done": 1.5, "total": 6, "unit": "parts", "note": "extract"})
    stage = api.stage(job["id"], "canary")
    assert (stage["progress_percentage"], stage["estimated_remaining_seconds"]) == (25.0, None)
    assert api.job(job["id"])["estimated_finish"] is None


@pytest.mark.parametrize("end", ["its worker falls silent", "its worker starts again", "it fails"])
def test_what_a_unit_had_reached_counts_no_more_once_it_may_be_lost(api, end):
    job = api.post()
    one, first = api.reach("generate")
    other = api.worker("w2")
    second = other.take()
    api.clock.pass_(10)
    one.beat(first, progress={"done": 90, "total": 100, "unit": "samples", "rate_per_s": 1})
    other.beat(second, progress={"done": 10, "total": 100, "unit": "samples", "rate_per_s": 1})

    if end == "it fails":
        one.fail(first)
    elif end == "its worker starts again":
        api.worker(incarnation="2").claim(queues=["prep"])
    else:
        api.clock.pass_(55)
        other.beat(second, progress={"done": 10, "total": 100, "unit": "samples", "rate_per_s": 1})
        api.clock.pass_(10)
        api.house.claims.reap()

    assert api.unit_states(job["id"], "generate") == ["queued", "running"]
    stage = api.stage(job["id"], "generate")
    assert (stage["progress_percentage"], stage["estimated_remaining_seconds"]) == (5.0, 100 + 90)
