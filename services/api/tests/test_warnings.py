"""What a stage finds odd is seen in the job; what the store has no room for is refused before it is made."""

from __future__ import annotations

from typing import Any

import pytest

CLAMP = "vocab.draft_vocab_size 64 is more than the 40 distinct tokens that the data holds: the drafter gets 40"


def says(**stages: dict[str, Any]):
    """A reduction that adds the fields given for a stage to what it found."""

    def reduce(name, _spec, units):
        found = units[0] if len(units) == 1 else {"units": len(units)}
        return {**found, **stages.get(name, {})}

    return reduce


def room(least: int, most: int):
    """Prepare says what states need; the answers then have two tokens on average."""
    prepared = {"states_bytes": most, "states_bytes_least": least, "verifier": {"hidden_size": 1}}
    return says(prepare=prepared, generate={"samples": 4, "tokens": 40, "answer_tokens": 8})


class Store:
    """How much room there is, as the test says."""

    def __init__(self, api, free: int | None) -> None:
        self.free = free
        api.store.free_bytes = lambda: self.free


def test_a_stages_warnings_are_the_jobs(make_api):
    api = make_api(reduce=says(vocab={"warnings": [CLAMP, CLAMP]}))
    job = api.post()

    api.worker().run()

    assert api.job(job["id"])["warnings"] == ["looks small", f"vocab: {CLAMP}"]
    assert [e["message"] for e in api.events(job["id"]) if e["type"] == "job.warning"] == [
        "looks small",
        f"vocab: {CLAMP}",
    ]


def test_what_was_said_when_the_job_was_posted_is_not_said_again_by_a_stage(make_api):
    api = make_api(reduce=says(prepare={"warnings": ["looks small"]}))
    job = api.post()

    api.worker().run()

    assert api.job(job["id"])["warnings"] == ["looks small"]


def test_a_reused_stage_warns_again(make_api, document):
    api = make_api(reduce=says(vocab={"warnings": [CLAMP]}))
    api.post()
    api.worker().run()

    again = api.post(document("wolf", training={"epochs": 9}))
    api.worker().run()

    assert f"vocab: {CLAMP}" in api.job(again["id"])["warnings"]
    assert api.stage(again["id"], "vocab")["reused"]


def test_warnings_without_end_are_cut(make_api):
    api = make_api(reduce=says(prepare={"warnings": [f"{i} " + "x" * 5000 for i in range(500)]}))
    job = api.post()

    api.worker().run()

    warnings = api.job(job["id"])["warnings"]
    assert len(warnings) == 100
    assert max(map(len, warnings)) <= 1100


@pytest.mark.parametrize("odd", [7, [None], {"a": 1}, "text"])
def test_odd_warnings_of_a_worker_do_not_break_the_job_document(make_api, odd):
    api = make_api(reduce=says(prepare={"warnings": odd}))
    job = api.post()

    api.worker().run()

    assert api.job(job["id"])["status"] in ("succeeded", "failed")


@pytest.mark.parametrize("free", [1000, None])
def test_states_that_fit_or_a_store_that_does_not_say_stop_nothing(make_api, free):
    api = make_api(reduce=room(1000, 1000))
    Store(api, free)
    job = api.post()

    api.worker().run()

    assert (api.job(job["id"])["status"], api.job(job["id"])["warnings"]) == ("succeeded", ["looks small"])


def test_a_store_too_small_for_the_states_ends_the_job_before_the_canary(make_api):
    api = make_api(reduce=room(1000, 4000))
    Store(api, 999)
    job = api.post()

    ran = api.worker().run()

    shown = api.job(job["id"])
    assert (ran, shown["status"], shown["reason"]["code"]) == (["prepare"], "failed", "store.too_small")
    assert "even if every answer has a single token" in shown["reason"]["detail"]
    assert shown["reason"]["context"] == {"needed_bytes": 1000, "free_bytes": 999}
    assert shown["reason"]["remedy"]


def test_states_that_fit_only_if_answers_are_short_are_a_warning_that_says_how_short(make_api):
    api = make_api(reduce=room(1000, 3000))
    Store(api, 2000)
    job = api.post()

    api.worker().run()

    (warning,) = api.job(job["id"])["warnings"][1:]
    assert "up to 0.00 GB if every answer has the 1024 tokens" in warning
    assert "about 512 tokens on average" in warning


def test_a_job_whose_prepare_is_reused_is_checked_too(make_api, document):
    api = make_api(reduce=room(1000, 1000))
    store = Store(api, 1000)
    api.post()
    api.worker().run()
    store.free = 999

    job = api.post(document("wolf", verifier={"model": "/models/v", "dtype": "float32"}))
    other = api.post(document("bear", data={"regenerate": {"max_new_tokens": 9}}))
    api.worker().run()

    assert {api.job(j["id"])["reason"]["code"] for j in (job, other)} == {"store.too_small"}


def test_states_that_another_job_left_behind_need_no_room(make_api, document):
    api = make_api(reduce=room(1000, 1000))
    store = Store(api, 1000)
    api.post()
    api.worker().run(also=True)
    store.free = 0

    job = api.post(document("wolf", training={"epochs": 9}))
    api.worker().run()

    assert api.job(job["id"])["status"] == "succeeded"


def test_room_that_shrinks_between_canary_and_extraction_is_seen(make_api):
    api = make_api(reduce=room(1000, 1000))
    store = Store(api, 1000)
    job = api.post()
    worker, unit = api.reach("canary")
    store.free = 999

    worker.commit(unit)

    assert (api.job(job["id"])["status"], api.job(job["id"])["stage"]) == ("failed", "generate")


def test_a_retry_looks_at_the_room_again(make_api):
    api = make_api(reduce=room(1000, 1000))
    store = Store(api, 999)
    job = api.post()
    api.worker().run()
    store.free = 1000

    assert api.http.post(f"/jobs/{job['id']}/retry").status_code == 202
    api.worker().run()

    assert api.job(job["id"])["status"] == "succeeded"


def test_a_paused_job_stands_before_nobody(api, document):
    first, second = api.post(), api.post(document("hen"))
    assert api.worker("w2").claim(queues=["train"]) is None
    assert api.http.post(f"/jobs/{first['id']}/pause").status_code in (200, 202)

    assert "first" not in api.job(second["id"])["why_queued"]
