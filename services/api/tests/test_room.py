"""A full store pauses jobs, fails none, and they go on once there is room: a tenant's budget, a disk, a bucket that says 507."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from servers import s3
from servers.faults import FaultProxy, Schedule

from eagle3_core.digests import digest_bytes
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.objects.keys import owner_of
from eagle3_core.objects.s3 import s3_store


@dataclass
class Looked:
    """What a look at verifier and data finds."""

    sources: dict[str, str]
    warnings: Sequence[str] = ()
    train_peak_bytes: int = 3 << 30


def by_name(spec: JobSpec, _roots: Sequence[Path]) -> Looked:
    """A look that tells data sets apart."""
    uris = [d.uri for d in (*spec.datasets, *spec.evaluation.prompts)]
    return Looked({"verifier": "v" * 64, **{uri: digest_bytes(uri.encode()) for uri in uris}})


def failures(api: Any, job: str) -> list[str]:
    return [
        event["message"] for event in api.events(job) if event["type"] in ("unit.failed", "unit.lost", "job.failed")
    ]


def told(api: Any, job: str) -> tuple[str, str | None]:
    shown = api.job(job)
    return shown["status"], (shown["reason"] or {}).get("code")


def limit(api: Any, store_bytes: int | None, tenant: str = "default") -> None:
    """Let the results of a tenant hold so much."""
    assert api.http.patch(f"/tenants/{tenant}", json={"store_bytes": store_bytes}).status_code == 200


@pytest.fixture
def tight(make_api: Callable[..., Any], document: Callable[..., Any]) -> Any:
    """A house that one job has filled, with states that can be let go and much that cannot."""
    api = make_api(preflight=by_name, room_bytes=0, max_attempts=1, collect_grace_s=0.0)
    api.post(document("first", datasets=[{"uri": "file:///data/first.jsonl"}]))
    api.worker().run()
    return api


@pytest.fixture
def server(tmp_path: Path) -> Iterator[s3.S3Server]:
    """A real S3 server, ended whatever happens."""
    server = s3.start(s3.kinds()[0], tmp_path)
    yield server
    server.stop()


def test_over_its_budget_a_tenants_jobs_wait_and_go_on_when_there_is_room(tight: Any, document: Callable[..., Any]):
    job = tight.post(document("second"))["id"]
    worker, unit = tight.reach("prepare")
    limit(tight, 1)

    tight.house.storage.room.watch()

    assert told(tight, job) == ("paused", "store.full")
    assert tight.job(job)["reason"]["context"]["budget_bytes"] == 1
    assert worker.beat(unit).json()["give_back"] is True
    assert worker.fail(unit, "preempted").status_code == 200
    assert worker.claim() is None
    tight.house.storage.keep_order()
    assert told(tight, job) == ("paused", "store.full"), "nothing has gone yet"

    everything = {"dataset": "file:///data/first.jsonl", "everything": True}
    assert tight.http.post("/storage/deletions", json=everything).json()["remaining"] == 0
    tight.house.storage.keep_order()

    assert told(tight, job) == ("queued", None)
    assert failures(tight, job) == []
    limit(tight, None)
    tight.worker().run()
    assert told(tight, job) == ("succeeded", None)


def test_a_commit_that_comes_while_its_job_waits_for_room_counts(tight: Any, document: Callable[..., Any]):
    job = tight.post(document("second"))["id"]
    worker, unit = tight.reach("prepare")
    limit(tight, 1)
    tight.house.storage.room.watch()

    assert worker.commit(unit).status_code == 200

    assert tight.unit_states(job, "prepare") == ["succeeded"]
    assert told(tight, job) == ("paused", "store.full")


def test_another_tenants_jobs_do_not_wait(tight: Any, document: Callable[..., Any]):
    assert tight.http.post("/tenants", json={"id": "other"}).status_code == 201
    mine = tight.post(document("second"))["id"]
    with tight.house.db.write() as session:
        from aerie_api.tables import CommitRow

        for row in session.query(CommitRow):
            row.tenant = "other"
    limit(tight, 1)
    limit(tight, 1, "other")

    tight.house.storage.room.watch()

    standing = tight.house.storage.room.budgets()
    assert [name for name, budget in standing.items() if budget.excess() > 0] == ["other"]
    assert told(tight, mine) == ("queued", None)


def test_what_a_person_paused_stays_paused_when_there_is_room(tight: Any, document: Callable[..., Any]):
    limit(tight, 1)
    job = tight.post(document("second"))["id"]
    assert tight.http.post(f"/jobs/{job}/pause").status_code == 202
    tight.http.post("/storage/deletions", json={"dataset": "file:///data/first.jsonl", "everything": True})

    tight.house.storage.keep_order()

    assert told(tight, job) == ("paused", "job.paused")


def test_a_job_that_met_a_full_disk_goes_on_when_enough_is_free(make_api: Callable[..., Any]):
    api = make_api(max_attempts=1, room_bytes=1 << 20)
    job = api.post()["id"]
    worker, unit = api.reach("generate")
    free = [1000]
    api.store.free_bytes = lambda: free[0]
    worker.fail(unit, retryable=False, code="store.full")

    api.house.storage.room.watch()
    assert told(api, job) == ("paused", "store.full")
    free[0] = 1 << 21
    api.house.storage.room.watch()

    assert told(api, job) == ("queued", None)
    worker.run()
    assert told(api, job) == ("succeeded", None)
    assert failures(api, job) == []


def test_a_job_that_met_a_full_bucket_goes_on_when_the_bucket_takes_something_again(
    make_api: Callable[..., Any], server: s3.S3Server
):
    schedule = Schedule(0, ["full"], share=1.0, limit=1000)
    with FaultProxy(server.port, schedule) as proxy:  # type: ignore[attr-defined]
        schedule.on = False
        api = make_api(max_attempts=1, store=s3_store(server.url("p", endpoint=proxy.endpoint), server.environment))
        job = api.post()["id"]
        worker, unit = api.reach("generate")
        schedule.on = True
        worker.fail(unit, retryable=False, code="store.full")

        api.house.storage.room.watch()
        assert told(api, job) == ("paused", "store.full")
        assert schedule.done["full"] > 0
        schedule.on = False
        api.house.storage.room.watch()

        assert told(api, job) == ("queued", None)
        worker.run()
        assert told(api, job) == ("succeeded", None)
        assert not [stat.key for stat in api.store.list("_aerie/probe/")]


def test_a_full_store_lets_idle_states_go_before_jobs_wait_for_a_person(
    make_api: Callable[..., Any], document: Callable[..., Any]
):
    api = make_api(preflight=by_name, max_attempts=1, room_bytes=1 << 20, collect_grace_s=0.0)
    api.house.storage._collector._grace_s = -60.0
    api.post(document("old", datasets=[{"uri": "file:///data/old.jsonl"}]))
    api.worker().run()
    job = api.post(document("new"))["id"]
    worker = api.worker()
    while (unit := worker.take()).stage != "train":
        worker.commit(unit, content="new")
    held = lambda: [s.key for s in api.store.list("") if (o := owner_of(s.key)) and o.stage == "extract"]  # type: ignore[union-attr]  # noqa: E731
    before = len(held())
    api.store.free_bytes = lambda: (1 << 21) if len(held()) < before else 0
    worker.fail(unit, retryable=False, code="store.full")
    api.clock.pass_(10)

    api.house.storage.room.watch()

    assert told(api, job) == ("queued", None)
    assert 0 < len(held()) < before
    assert worker.run()[-1] == "package"
