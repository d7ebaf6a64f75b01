"""What the API does with the store: nothing that counts is collected, what expired goes, a deletion leaves its proof."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from servers import s3
from sqlalchemy import update

from aerie_api.jobs.repository import JobRepository
from aerie_api.storage.service import StoreOwnedElsewhere
from aerie_api.tables import CommitRow
from eagle3_core.digests import digest_bytes
from eagle3_core.objects.keys import HOUSE_PREFIX, owner_of
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import Manifest, UnitWriter, read_manifest
from eagle3_core.objects.s3 import s3_store

NOW = {"collect_grace_s": 0.0, "checkpoint_grace_s": 0.0}


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.S3Server]:
    """A real S3 server for all tests of the session."""
    server = s3.start(s3.kinds()[0], tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture(params=["folder", "bucket"])
def make_api(make_api: Callable[..., Any], request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Builds an API over a folder, and over a prefix of its own on a real S3 server."""

    def make(folder: str = "a", **given: Any) -> Any:
        if request.param == "bucket" and "store" not in given:
            server: s3.S3Server = request.getfixturevalue("bucket")
            given["store"] = s3_store(server.url(f"test-{secrets.token_hex(8)}"), server.environment)
        return make_api(folder, **given)

    return make


@pytest.fixture
def swift(make_api: Callable[..., Any]) -> Any:
    """An API that collects without a grace period."""
    api = make_api(**NOW)
    api.house.storage._collector._grace_s = api.house.storage._collector._checkpoint_grace_s = -60.0
    return api


def held(api: Any) -> set[str]:
    return {stat.key for stat in api.store.list("") if not stat.key.startswith(HOUSE_PREFIX)}


def stages_held(api: Any) -> set[str]:
    return {owner_of(key).stage for key in held(api)}  # type: ignore[union-attr]


def test_a_finished_job_loses_nothing(swift: Any):
    job = swift.post()["id"]
    swift.worker().run(also=True)
    before = held(swift)

    swept = swift.house.storage.keep_order()

    assert swift.job(job)["status"] == "succeeded"
    assert held(swift) == before
    assert swept.unreadable == []


def test_what_a_dead_attempt_left_goes_and_what_a_running_one_writes_stays(swift: Any):
    swift.post()
    worker, unit = swift.reach("generate")
    dead = swift.worker("w2").take()
    swift.worker("w2").made(dead)
    assert swift.worker("w2").fail(dead).status_code == 200
    running = worker.made(unit, also=True)

    swept = swift.house.storage.keep_order()

    assert swept.deleted == 2  # a file and its manifest
    assert worker.commit(unit, running).status_code == 200
    swift.clock.pass_(1000)
    assert worker.run(limit=1) == ["generate"]
    swift.house.storage.keep_order()
    for manifest in (running.output.manifest, running.also[0].manifest):
        assert read_manifest(swift.store, manifest).files


def test_a_failed_job_keeps_what_a_retry_goes_on_from(swift: Any):
    job = swift.post()["id"]
    worker, unit = swift.reach("train")
    checkpoint = f"{unit.tenant}/checkpoints/{unit.key}/00000001-000001-complete.json"
    swift.store.put_bytes(checkpoint, b"{}")
    before = held(swift)
    swift.house.storage.keep_order()
    assert held(swift) == before

    assert worker.fail(unit, retryable=False).status_code == 200
    swift.house.storage.keep_order()
    ran_before = [s for s in swift.job(job)["stages"] if s["state"] == "succeeded"]
    assert swift.http.post(f"/jobs/{job}/retry").status_code == 202

    assert swift.worker().run() == ["train", "evaluate", "evaluate", "package"]
    assert len(ran_before) >= 4


def test_a_commit_that_lists_anothers_objects_is_refused(api: Any):
    api.post()
    worker, unit = api.reach("generate")
    stranger = UnitWriter(
        api.store, tenant="other", job_id="job_x", stage="generate", unit=(0, 0, 2), unit_key=unit.key, fence=1
    )
    stolen = stranger.add_bytes("secret.bin", b"theirs")
    commit = worker.made(unit)
    manifest = json.loads(api.store.get_bytes(commit.output.manifest.key))
    manifest["files"].append(stolen.model_dump())
    data = json.dumps(manifest).encode()
    api.store.put_bytes(commit.output.manifest.key, data)
    ref = commit.output.manifest
    ref.blake3, ref.content = digest_bytes(data), Manifest.model_validate(manifest).content()

    answer = worker.commit(unit, commit)

    assert (answer.status_code, answer.json()["code"]) == (422, "commit.refused")
    assert "did not write" in answer.json()["detail"]


def test_a_commit_under_another_attempts_keys_is_refused(api: Any):
    api.post()
    worker, unit = api.reach("generate")
    older = unit.model_copy(update={"fence": unit.fence + 5})

    answer = worker.commit(unit, worker.made(older))

    assert (answer.status_code, answer.json()["code"]) == (422, "commit.refused")


def test_states_go_when_nobody_used_them_for_long_and_a_new_job_makes_them_again(
    make_api: Callable[..., Any], document: Callable[..., Any]
):
    api = make_api(retain_states_s=3600.0, **NOW)
    api.house.storage._collector._grace_s = -60.0
    first = api.post()["id"]
    api.worker().run()
    assert "extract" in stages_held(api)

    api.clock.pass_(3601)
    api.house.storage.keep_order()

    assert "extract" not in stages_held(api)
    assert "package" in stages_held(api)
    assert api.http.get(f"/jobs/{first}/artifacts").json()["data"]
    api.post(document("second", training={"epochs": 9}))
    assert "extract" in api.worker().run()


def test_states_that_a_living_job_reads_stay_however_old(make_api: Callable[..., Any]):
    api = make_api(retain_states_s=10.0, **NOW)
    api.house.storage._collector._grace_s = -60.0
    api.post()
    api.reach("train")

    api.clock.pass_(1e6)
    api.house.storage.keep_order()

    assert "extract" in stages_held(api)


def test_a_failed_job_whose_states_went_makes_them_again_on_retry(make_api: Callable[..., Any]):
    api = make_api(retain_states_s=10.0, **NOW)
    api.house.storage._collector._grace_s = -60.0
    job = api.post()["id"]
    worker, unit = api.reach("train")
    worker.fail(unit, retryable=False)

    api.clock.pass_(100)
    api.house.storage.retention.expire()  # let go, not yet collected: a retry must not build on what is about to go
    assert api.http.post(f"/jobs/{job}/retry").status_code == 202

    ran = api.worker().run()
    api.house.storage.keep_order()
    assert ran[:2] == ["extract", "extract"]
    assert api.job(job)["status"] == "succeeded"
    assert "extract" in stages_held(api)


def test_over_its_budget_a_tenant_loses_the_least_used_states_first(make_api: Callable[..., Any]):
    api = make_api(**NOW)
    api.house.storage._collector._grace_s = -60.0
    api.post()
    api.worker().run()
    api.http.patch("/tenants/default", json={"store_bytes": 1})

    api.house.storage.keep_order()

    assert "extract" not in stages_held(api)
    use = api.http.get("/storage").json()
    assert use["budget_bytes"] == 1
    assert use["bytes"] == sum(use["by_stage"].values()) > 1


def test_a_deletion_takes_what_was_made_of_a_data_set_and_proves_it(swift: Any):
    job = swift.post()["id"]
    worker, dead = swift.reach("generate")
    worker.made(dead)
    worker.fail(dead)
    swift.clock.pass_(1000)
    swift.worker().run()
    gone = {key for key in held(swift) if owner_of(key).stage in ("prepare", "generate", "extract")}  # type: ignore[union-attr]

    answer = swift.http.post("/storage/deletions", json={"dataset": "file:///data/train.jsonl"})

    proof = answer.json()
    assert (answer.status_code, proof["status"], proof["remaining"]) == (201, "done", 0)
    listed = swift.http.get(f"/storage/deletions/{proof['id']}/objects").json()["data"]
    assert {entry["key"] for entry in listed} == gone
    assert proof["objects"] == len(gone)
    committed = [entry for entry in listed if entry["blake3"]]
    assert committed
    assert all(entry["key"].split("-")[-2] == entry["blake3"][:16] for entry in committed if "out.bin" in entry["key"])
    assert not gone & held(swift)
    assert {"train", "package"} <= stages_held(swift)
    assert swift.http.get(f"/storage/deletions/{proof['id']}").json() == proof
    assert swift.job(job)["status"] == "succeeded"


@pytest.mark.parametrize(
    "name", ["/data/train.jsonl", "file://localhost/data/train.jsonl", "file:///data/./tr%61in.jsonl"]
)
def test_a_data_set_is_known_by_every_form_of_its_path(swift: Any, name: str):
    swift.post()
    swift.worker().run()

    proof = swift.http.post("/storage/deletions", json={"dataset": name}).json()

    assert (proof["status"], proof["remaining"]) == ("done", 0)
    assert proof["objects"] > 0
    assert not stages_held(swift) & {"prepare", "generate", "extract"}


@pytest.mark.parametrize(
    "name", ["file:///data/trian.jsonl", "train.jsonl", "file://elsewhere/data/train.jsonl", "0" * 64]
)
def test_a_data_set_that_no_job_read_proves_nothing(swift: Any, name: str):
    swift.post()
    swift.worker().run()
    before = held(swift)

    answer = swift.http.post("/storage/deletions", json={"dataset": name})

    assert (answer.status_code, answer.json()["code"]) == (404, "storage.dataset_unknown")
    assert held(swift) == before


def test_a_deletion_of_everything_leaves_nothing(swift: Any):
    swift.post()
    swift.worker().run()

    proof = swift.http.post("/storage/deletions", json={"everything": True}).json()

    assert proof["remaining"] == 0
    assert held(swift) == set()


def test_what_a_living_job_reads_is_not_deleted(swift: Any):
    job = swift.post()["id"]
    swift.reach("generate")

    answer = swift.http.post("/storage/deletions", json={})

    assert (answer.status_code, answer.json()["code"]) == (409, "storage.in_use")
    assert job in answer.json()["detail"]


def test_a_deletion_that_was_cut_short_is_finished_later(swift: Any, monkeypatch: pytest.MonkeyPatch):
    swift.post()
    swift.worker().run()
    deleted: list[str] = []
    real = type(swift.store).delete

    def dies(store: Any, key: str) -> None:
        if len(deleted) == 2:
            raise OSError("the process died here")
        deleted.append(key)
        real(store, key)

    monkeypatch.setattr(type(swift.store), "delete", dies)
    assert swift.http.post("/storage/deletions", json={}).status_code == 500
    monkeypatch.setattr(type(swift.store), "delete", real)

    swift.house.storage.keep_order()

    [row] = swift.house.db.engine.connect().exec_driver_sql("SELECT id FROM deletions").all()
    proof = swift.http.get(f"/storage/deletions/{row[0]}").json()
    assert (proof["status"], proof["remaining"]) == ("done", 0)
    assert proof["objects"] > 2


def test_a_data_set_with_a_nul_in_its_name_is_refused(api: Any):
    answer = api.http.post("/storage/deletions", json={"dataset": "file:///a\x00b"})

    assert (answer.status_code, answer.json()["code"]) == (422, "request.invalid")


@pytest.mark.parametrize("path", ["/storage/deletions/del_x", "/storage/deletions/del_x/objects"])
def test_a_deletion_that_is_not_there_is_a_404(api: Any, path: str):
    assert api.http.get(path).json()["code"] == "storage.deletion_missing"


def test_an_empty_database_collects_nothing_from_a_store_that_is_anothers(make_api: Callable[..., Any]):
    first, second = make_api("a", **NOW), make_api("b", **NOW)
    first.post()
    first.worker().run()
    first.house.storage.keep_order()
    second.house.storage._store = second.house.storage._collector._store = first.store
    before = held(first)

    with pytest.raises(StoreOwnedElsewhere):
        second.house.storage.keep_order()

    assert held(first) == before


def test_a_bucket_hands_out_urls_that_anyone_can_download_and_a_folder_none(api: Any):
    job = api.post()["id"]
    api.worker().run()

    files = api.http.get(f"/jobs/{job}/artifacts").json()["data"]

    assert files
    for file in files:
        if isinstance(api.store, LocalStore):
            assert file["url"] is None
        else:
            answer = httpx.get(file["url"])
            assert digest_bytes(answer.content) == file["blake3"]
            assert file["name"].rpartition("/")[2] in answer.headers["content-disposition"]


def test_what_a_removed_job_made_of_a_data_set_is_deleted_too(swift: Any):
    job = swift.post()["id"]
    swift.worker().run(also=True)
    with swift.house.db.write() as session:
        session.delete(JobRepository(session, "default").get(job))

    proof = swift.http.post("/storage/deletions", json={"dataset": "file:///data/train.jsonl"}).json()

    assert (proof["status"], proof["remaining"]) == ("done", 0)
    assert proof["objects"] > 0
    assert stages_held(swift) == {"canary", "vocab", "train", "evaluate", "package"}


def test_results_from_before_they_were_counted_are_counted(swift: Any):
    swift.post()
    swift.worker().run()
    before = swift.http.get("/storage").json()
    with swift.house.db.write() as session:
        session.execute(update(CommitRow).values(bytes=None))
    assert swift.http.get("/storage").json()["bytes"] == 0

    swift.house.storage.keep_order()

    assert swift.http.get("/storage").json()["by_stage"] == before["by_stage"]
