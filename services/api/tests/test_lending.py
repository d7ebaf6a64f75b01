"""What is lent to a unit's process: one request for one object, decided by the attempt and by nothing that is asked."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3
from hypothesis import given
from hypothesis import strategies as st
from servers import s3

from aerie_api.leases.lending import Rights
from eagle3_core.digests import digest_bytes
from eagle3_core.jobs.wire import ObjectAnswer, ObjectAsk
from eagle3_core.objects.keys import Attempt, Training
from eagle3_core.objects.lent import LentStore
from eagle3_core.objects.s3 import S3Store, s3_store


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.OwnServer]:
    server = s3.own(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture
def bucket(server: s3.OwnServer) -> S3Store:
    return s3_store(server.url(f"test-{secrets.token_hex(8)}"), server.environment)


@pytest.fixture
def api(make_api, bucket):
    return make_api(store=bucket)


def asked(worker, unit, do: str, key: str, **more):
    return worker.tell(unit, "objects", {"do": do, "key": key, **more})


def sent(method: str, answer, body: bytes | None = None) -> tuple[int, bytes]:
    """The store's answer to a request that was lent."""
    lent = ObjectAnswer.model_validate_json(answer.content)
    with urllib3.PoolManager() as pool:
        response = pool.request(method, str(lent.url), headers=lent.headers, body=body)
    return response.status, response.data


def own_key(unit, stage: str | None = None) -> str:
    return Attempt(unit.tenant, stage or unit.stage, unit.job_id, unit.unit.index, unit.fence).prefix + "ab-cd-out.bin"


def test_a_unit_reads_its_inputs_and_writes_under_its_own_attempt(api):
    api.post()
    worker, unit = api.reach("generate")
    (prepared,) = unit.inputs["prepare"]

    status, data = sent("GET", asked(worker, unit, "get", prepared.key))
    written = [
        sent("PUT", asked(worker, unit, "put", own_key(unit, stage), blake3=digest_bytes(b"states")), b"states")[0]
        for stage in ("generate", "extract")  # the answers, and the states that they were made with
    ]

    assert (status, b'"stage": "prepare"' in data or b'"stage":"prepare"' in data) == (200, True)
    assert written == [200, 200]
    assert api.store.get_bytes(own_key(unit)) == b"states"
    listed = asked(
        worker, unit, "list", Attempt(unit.tenant, "generate", unit.job_id, unit.unit.index, unit.fence).prefix
    )
    assert [found["key"] for found in listed.json()["found"]] == [own_key(unit)]
    assert asked(worker, unit, "delete", own_key(unit)).status_code == 200
    assert list(api.store.list(own_key(unit))) == []


def test_nothing_else_is_lent_whoever_it_belongs_to(api):
    job = api.post()
    worker, unit = api.reach("generate")
    other = worker.take()
    (prepared,) = unit.inputs["prepare"]
    red = Attempt("red", "prepare", job["id"], 0, 1).prefix + "ab-cd-manifest.json"
    api.store.put_bytes(red, b"another tenant's")

    refused = [
        asked(worker, unit, do, key)
        for do, key in (
            ("get", red), ("get", own_key(other)), ("get", "_aerie/owner/x"), ("get", "../etc/passwd"), ("get", f"default/{red}"),
            ("put", prepared.key), ("put", own_key(other)), ("put", red), ("begin", red), ("delete", prepared.key), ("delete", red),
            ("put", own_key(unit, "prepare")), ("put", own_key(unit, "train")), ("part", red), ("end", red), ("abort", red),
            ("list", ""), ("list", "default/"), ("list", "red/"), ("list", f"default/checkpoints/{unit.key}/"),
            ("get", Training("default", unit.key).prefix + "00000001-000001-complete.json"),
        )
    ]  # fmt: skip

    assert {answer.json()["code"] for answer in refused} <= {"object.not_lent", "request.invalid"}
    assert not any("X-Amz" in answer.text for answer in refused)
    assert api.store.get_bytes(red) == b"another tenant's"


def test_a_training_keeps_its_checkpoints_and_packaging_ends_them(api):
    api.post()
    worker, unit = api.reach("train")
    place = Training(unit.tenant, unit.key).prefix
    checkpoint = f"{place}00000001-{unit.fence:06d}-complete.json"

    assert sent("PUT", asked(worker, unit, "put", checkpoint), b"{}")[0] == 200
    assert [found["key"] for found in asked(worker, unit, "list", place).json()["found"]] == [checkpoint]
    assert (
        asked(worker, unit, "put", Training("default", "e" * 64).prefix + "00000001-000001-x").json()["code"]
        == "object.not_lent"
    )
    assert worker.commit(unit).status_code == 200

    worker, package = api.reach("package")
    assert asked(worker, package, "put", checkpoint).json()["code"] == "object.not_lent"
    assert asked(worker, package, "delete", checkpoint).status_code == 200
    assert asked(worker, package, "list", place).json()["found"] == []


def test_an_attempt_that_is_over_is_lent_nothing_and_a_strangers_token_nothing_at_all(api):
    api.post()
    worker, unit = api.reach("generate")
    other = worker.take()
    assert worker.tell(unit, "objects", {"do": "get", "key": own_key(unit)}, token=other.token).status_code == 401
    assert worker.commit(unit).status_code == 200

    late = asked(worker, unit, "put", own_key(unit))

    assert (late.status_code, late.json()["code"]) == (409, "lease.lost")


def test_a_request_is_good_for_as_long_as_the_operator_says(make_api, bucket):
    api = make_api(store=bucket, lend_s=77)
    api.post()
    worker, unit = api.reach("prepare")

    answer = asked(worker, unit, "get", own_key(unit)).json()

    assert (answer["lasts_s"], "X-Amz-Expires=77&" in answer["url"]) == (77, True)


@pytest.mark.parametrize("given", ["a folder", "nothing lent"])
def test_a_worker_without_a_key_gets_no_work_where_nothing_can_be_lent(make_api, bucket, given: str):
    api = make_api() if given == "a folder" else make_api(store=bucket, lend_s=0)
    api.post()

    answer = api.worker().ask(lent=True)

    assert (answer.status_code, answer.json()["code"]) == (409, "store.not_lent")
    assert "AERIE_STORE" in answer.json()["remedy"]
    assert api.worker().claim() is not None


TENANTS, STAGES = ["default", "red", ".."], ["prepare", "extract", "train", "checkpoints", ""]
PARTS = st.sampled_from([*TENANTS, *STAGES, "job_1", "job_2", "00000", "00001", "k1"])
FILES = st.sampled_from(["000001-ab-cd-x", "000002-ab-cd-x", "00000001-000001-x", "x"])
KEYS = st.builds(lambda parts, file: "/".join([*parts, file]), st.lists(PARTS, max_size=5), FILES)


@given(KEYS, st.sampled_from(["get", "put", "begin", "part", "end", "abort", "delete", "list"]))
def test_whatever_key_is_asked_for_a_right_never_leaves_its_prefixes(key: str, do: str):
    made, own = Attempt("default", "extract", "job_1", 0, 1), Attempt("default", "train", "job_1", 0, 2)
    training = Training("default", "k1")
    rights = Rights(frozenset([made]), frozenset([own, training]), frozenset())

    allowed = rights.allow(ObjectAsk(do=do, key=key))  # type: ignore[arg-type]

    inside = [owner.prefix for owner in ((own, training) if do != "get" else (own, training, made))]
    assert not allowed or any(key.startswith(prefix) for prefix in inside)


def test_every_lent_object_lies_where_the_store_of_the_house_would_have_put_it(api, tmp_path: Path):
    api.post()
    worker, unit = api.reach("prepare")

    class Route:
        def ask(self, ask: ObjectAsk) -> ObjectAnswer:
            return ObjectAnswer.model_validate_json(worker.tell(unit, "objects", ask.model_dump_json()).content)

    lent, large = LentStore(Route(), part_bytes=5 << 20), tmp_path / "large"
    large.write_bytes(secrets.token_bytes((5 << 20) + 3))
    lent.put_file(own_key(unit), large)

    assert api.store.get_bytes(own_key(unit)) == large.read_bytes()
    assert worker.run(limit=1) == []  # the unit is still this worker's
    assert worker.commit(unit).status_code == 200
