"""A store whose every request is signed by somebody else does what a store must: against every real S3 server of this machine."""

from __future__ import annotations

import secrets
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import urllib3
from minio.credentials.credentials import Credentials
from minio.signer import presign_v4
from servers import s3
from servers.faults import FaultProxy, Schedule

from eagle3_core.jobs.wire import ObjectAnswer, ObjectAsk
from eagle3_core.objects.lent import LentStore
from eagle3_core.objects.protocol import BadKey, ObjectMissing, StoreRefused
from eagle3_core.objects.retry import Retries
from eagle3_core.objects.s3 import S3Store, s3_store
from eagle3_core.objects.s3_presign import presigned

MIB = 1 << 20
LEAST_PART = 5 * MIB


class Owner:
    """Signs whatever it is asked for, and remembers that."""

    def __init__(self, store: S3Store, lasts_s: int = 300) -> None:
        self.store, self.lasts_s = store, lasts_s
        self.asked: list[ObjectAsk] = []

    def ask(self, ask: ObjectAsk) -> ObjectAnswer:
        self.asked.append(ask)
        return self.store.lend(ask, self.lasts_s)


@pytest.fixture
def owner(bucket_store: S3Store) -> Owner:
    return Owner(bucket_store)


@pytest.fixture
def lent(owner: Owner) -> LentStore:
    return LentStore(owner, part_bytes=LEAST_PART)


@pytest.mark.parametrize("size", [0, 1, MIB, MIB + 1, 2 * LEAST_PART + 3])
def test_what_was_written_by_signed_requests_is_read_back_by_them(
    lent: LentStore, bucket_store: S3Store, tmp_path: Path, size: int
):
    data = secrets.token_bytes(size)
    source = tmp_path / "source"
    source.write_bytes(data)

    lent.put_bytes("a/bytes", data)
    lent.put_file("a/file", source)

    assert lent.get_bytes("a/bytes") == data
    assert lent.fetch("a/file", tmp_path / "copies").read_bytes() == data
    assert bucket_store.get_bytes("a/file") == data
    assert (lent.stat("a/file").size, [stat.key for stat in lent.list("a/")]) == (size, ["a/bytes", "a/file"])
    assert lent.stat("a/bytes").modified == pytest.approx(bucket_store.stat("a/bytes").modified, abs=1.5) or size == 0


def test_every_page_of_a_list_begins_where_the_last_one_ended(
    lent: LentStore, owner: Owner, monkeypatch: pytest.MonkeyPatch
):
    for name in "abcde":
        lent.put_bytes(f"k/{name}", b"")
    monkeypatch.setattr("eagle3_core.objects.s3_lend.FOUND_AT_ONCE", 2)
    begun: list[str | None] = []
    list_objects = owner.store.client.list_objects
    monkeypatch.setattr(
        owner.store.client, "list_objects", lambda **how: begun.append(how["start_after"]) or list_objects(**how)
    )

    assert [stat.key for stat in lent.list("k/")] == [f"k/{name}" for name in "abcde"]

    prefix = owner.store.address.prefix
    assert begun == [None, f"{prefix}k/b", f"{prefix}k/d"]


def test_ranges_come_as_they_were_asked_for(lent: LentStore):
    lent.put_bytes("k", b"0123456789")

    assert [lent.get_bytes("k", 2, 3), lent.get_bytes("k", 7), lent.get_bytes("k", 8, 9), lent.get_bytes("k", 20, 2)] == [
        b"234", b"789", b"89", b"",
    ]  # fmt: skip
    assert lent.get_bytes("k", 3, 0) == b""


def test_what_is_not_there_is_missing_and_what_is_no_key_is_not_asked_for(
    lent: LentStore, owner: Owner, tmp_path: Path
):
    for read in (lent.get_bytes, lent.stat, lambda key: lent.fetch(key, tmp_path)):
        with pytest.raises(ObjectMissing):
            read("no/such")
    owner.asked.clear()
    with pytest.raises(BadKey):
        lent.get_bytes("../etc/passwd")
    assert owner.asked == []


def test_a_small_object_keeps_its_digest_which_whoever_holds_the_url_cannot_leave_out(
    lent: LentStore, owner: Owner, server: s3.S3Server
):
    lent.put_bytes("k", b"content")
    ask = owner.asked[-1]
    signed = owner.ask(ask)

    with urllib3.PoolManager() as pool:
        bare = pool.request("PUT", str(signed.url), body=b"content")
        other = pool.request("PUT", str(signed.url), body=b"content", headers={"x-amz-meta-blake3": "0" * 64})

    assert signed.headers == {"x-amz-meta-blake3": ask.blake3}
    if server.kind != "rclone":  # it takes the headers of a signature without looking at them
        assert (bare.status // 100, other.status) == (4, 403)


@pytest.mark.parametrize("do", ["get", "put", "begin"])
def test_a_signed_request_is_good_for_its_method_and_its_object_alone(owner: Owner, do: str):
    owner.store.put_bytes("mine", b"mine")
    owner.store.put_bytes("other", b"other")
    url = str(owner.ask(ObjectAsk(do=do, key="mine")).url)  # type: ignore[arg-type]

    method = {"get": "GET", "put": "PUT", "begin": "POST"}[do]

    with urllib3.PoolManager() as pool:
        for tried, place in (
            ("DELETE", url),
            ("PUT" if do != "put" else "GET", url),
            (method, url.replace("/mine?", "/other?")),
        ):
            answer = pool.request(tried, place, body=b"bad" if tried == "PUT" else None)
            assert answer.status in (400, 403), (tried, place)

    assert (owner.store.get_bytes("mine"), owner.store.get_bytes("other")) == (b"mine", b"other")


def test_a_url_is_asked_for_once_and_anew_when_the_store_takes_it_no_more(bucket_store: S3Store):
    owner = Owner(bucket_store)
    lent = LentStore(owner)
    bucket_store.put_bytes("k", b"0123")
    for at in range(4):
        lent.get_bytes("k", at, 1)
    assert [ask.do for ask in owner.asked] == ["get"]

    lent._urls["k"] = lent._urls["k"][0].replace("X-Amz-Date=2", "X-Amz-Date=1"), float("inf")

    assert lent.get_bytes("k", 1, 2) == b"12"
    assert [ask.do for ask in owner.asked] == ["get", "get"]


def test_an_owner_without_rights_is_told_so_and_not_asked_again(server: s3.S3Server, s3_place: str):
    environment = {**server.environment, "AERIE_S3_SECRET_KEY": "wrong" * 8}
    owner = Owner(s3_store(s3_place, environment))

    with pytest.raises(StoreRefused):
        LentStore(owner).put_bytes("k", b"content")
    assert len(owner.asked) == 1


@pytest.mark.parametrize(
    "kind", ["slow_down", "internal_error", "reset", "half_upload", "lost_answer", "half_answer", "flip"]
)
def test_a_store_that_fails_at_times_costs_no_byte(s3_server: Callable[[str], s3.S3Server], tmp_path: Path, kind: str):
    server = s3_server(s3.kinds()[0])
    small, large = secrets.token_bytes(1000), tmp_path / "large"
    large.write_bytes(secrets.token_bytes(2 * LEAST_PART + 17))
    with FaultProxy(server.port, Schedule(7, [kind], share=0.4, limit=2)) as proxy:  # type: ignore[attr-defined]
        owner = Owner(s3_store(server.url(f"test-{secrets.token_hex(8)}", proxy.endpoint), server.environment))
        lent = LentStore(owner, part_bytes=LEAST_PART, retries=Retries(base_s=0.01))
        lent.put_bytes("small", small)
        if kind != "flip":  # of a large body only a reader notices a flipped bit, by the manifest's digest
            lent.put_file("large", large)
            assert lent.fetch("large", tmp_path / "copies").stat().st_size == large.stat().st_size

        assert lent.get_bytes("small") == small


def test_a_large_object_takes_little_memory_up_and_down(lent: LentStore, tmp_path: Path):
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(96 * MIB)
    tracemalloc.start()

    lent.put_file("k", source)
    copy = lent.fetch("k", tmp_path / "copies")

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert copy.stat().st_size == 96 * MIB
    assert peak < 24 * MIB


def test_an_upload_that_cannot_end_is_aborted(lent: LentStore, owner: Owner, tmp_path: Path):
    gone = tmp_path / "gone"
    gone.write_bytes(b"x" * (LEAST_PART + 5))
    sign = owner.ask

    def interrupted(ask: ObjectAsk) -> ObjectAnswer:
        if ask.do == "part" and ask.part == 2:
            raise StoreRefused("the unit is another's")
        return sign(ask)

    owner.ask = interrupted  # type: ignore[method-assign]
    with pytest.raises(StoreRefused, match="another's"):
        lent.put_file("k", gone)

    assert owner.asked[-1].do == "abort"
    assert list(owner.store.list("")) == []


def test_urls_are_signed_as_the_client_of_the_store_signs_them():
    at, who = datetime(2026, 11, 30, 12, 0, tzinfo=UTC), Credentials("key", "secret/+", "session=token")
    url = "https://s3.example:9000/bucket/a/b-c.safetensors"

    plain = Credentials("key", "secret/+")
    theirs = presign_v4(
        method="GET", url=urlsplit(url), region="eu-west-1", credentials=plain, date=at, expires=60
    )  # fmt: skip

    assert presigned("GET", url, "eu-west-1", plain, 60, now=at) == theirs.geturl()
    assert "X-Amz-Security-Token=session%3Dtoken" in presigned("GET", url, "eu-west-1", who, 60, now=at)
