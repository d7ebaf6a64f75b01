"""The S3 adapter on real servers: what a start-up probe finds out, who gets in, what is left behind, what it costs."""

from __future__ import annotations

import json
import logging
import re
import secrets
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import urllib3
from minio.commonconfig import ENABLED
from minio.credentials.credentials import Credentials
from minio.versioningconfig import VersioningConfig
from servers import certificates, s3

from eagle3_core.objects.location import store_at
from eagle3_core.objects.protocol import ObjectMissing, StoreFull, StoreRefused, StoreUnavailable, StoreUnfit
from eagle3_core.objects.retry import Retries
from eagle3_core.objects.s3 import S3Store, s3_store
from eagle3_core.objects.s3_address import s3_address
from eagle3_core.objects.s3_credentials import S3Credentials, credentials_in

NO_RETRY = Retries(attempts=1)
MIB = 1 << 20


# -- the probe


def test_the_probe_says_what_the_store_can_do(bucket_store: S3Store, server: s3.S3Server):
    can = bucket_store.probe()

    assert can.multipart
    assert can.presigned
    if server.kind == "versitygw":
        assert can.conditional_put
        assert "conditional put yes" in can.told()
    if server.kind == "rclone":  # it takes the second write, and the house must live with that
        assert not can.conditional_put
        assert "conditional put no" in can.told()


def test_a_bucket_that_is_not_there_is_named(server: s3.S3Server):
    url = re.sub(r"s3://[^/]+", "s3://no-such-bucket-here", server.url("p"))

    with pytest.raises(StoreUnfit, match="no-such-bucket-here"):
        s3_store(url, server.environment).probe()


def test_a_store_that_does_not_encrypt_is_refused_where_encryption_was_asked_for(server: s3.S3Server):
    if server.kind != "versitygw":
        pytest.skip("rclone says that it encrypts and does not, which nobody can see; a given store may well encrypt")
    with pytest.raises(StoreUnfit, match="AES256"):
        s3_store(server.url("p", sse="AES256"), server.environment).probe()


def test_a_store_without_ranges_is_refused(bucket_store: S3Store, monkeypatch: pytest.MonkeyPatch):
    get = bucket_store.client.get_object

    def whole(**asked: object) -> object:
        return get(bucket_name=asked["bucket_name"], object_name=asked["object_name"])  # type: ignore[arg-type]

    monkeypatch.setattr(bucket_store.client, "get_object", whole)

    with pytest.raises(StoreUnfit, match="range"):
        bucket_store.probe()


# -- who gets in


def test_a_wrong_secret_is_refused_in_words(server: s3.S3Server):
    wrong = {"AERIE_S3_ACCESS_KEY": "nobody", "AERIE_S3_SECRET_KEY": "guessed-wrong"}
    store = s3_store(server.url("p"), wrong)

    for act in (
        lambda: store.put_bytes("a", b"x"),
        lambda: store.get_bytes("a"),
        lambda: list(store.list("")),
        store.probe,
    ):
        with pytest.raises(StoreRefused, match="refused"):
            act()


def test_a_rotated_secret_is_taken_up_without_a_restart(server: s3.S3Server, tmp_path: Path):
    if not isinstance(server, s3.OwnServer):
        pytest.skip("needs the secret itself")
    held = tmp_path / "secret"
    held.write_text("an-old-one\n")
    credentials = S3Credentials("test", lambda: Credentials(server.access_key, held.read_text().strip()), lasts_s=-1)
    store = S3Store(s3_address(server.url(f"test-{secrets.token_hex(4)}")), credentials)
    with pytest.raises(StoreRefused):
        store.put_bytes("a", b"x")

    held.write_text(server.secret_key + "\n")
    store.put_bytes("a", b"x")
    store.put_bytes("large", bytes(2 * MIB))

    assert store.get_bytes("a") == b"x"


def test_no_secret_reaches_logs_or_errors(server: s3.S3Server, caplog: pytest.LogCaptureFixture, tmp_path: Path):
    secret = f"sesame{secrets.token_hex(8)}"
    (tmp_path / "access").write_text("nobody")
    (tmp_path / "secret").write_text(secret)
    named = {f"AERIE_S3_{w}_KEY_FILE": str(tmp_path / w.lower()) for w in ("ACCESS", "SECRET")}
    store = s3_store(server.url("p"), named)
    good = s3_store(server.url(f"test-{secrets.token_hex(8)}"), server.environment)
    told: list[str] = [repr(store), str(store), repr(store.__dict__)]

    with caplog.at_level(logging.DEBUG):
        for act in (
            lambda: store.put_bytes("a", b"x"), lambda: store.put_bytes("b", bytes(2 * MIB)), lambda: store.get_bytes("a"),
            lambda: good.get_bytes("a"), good.probe,
        ):  # fmt: skip
            try:
                act()
            except (StoreRefused, ObjectMissing) as error:
                told += [error.text(), json.dumps(error.problem()), "".join(traceback.format_exception(error))]

    everything = "\n".join([*told, caplog.text])
    assert len(told) > 9
    assert secret not in everything
    if isinstance(server, s3.OwnServer):
        assert server.secret_key not in everything


# -- TLS


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[tuple[s3.OwnServer, Path]]:
    """A server that speaks TLS with a certificate of an authority of its own."""
    if "versitygw" not in s3.kinds():
        pytest.skip("versitygw is the server that speaks TLS here, and there is no Go to build it")
    made = certificates.make(tmp_path / "tls")
    server = s3.OwnServer("versitygw", tmp_path / "server", tls=made)
    server.start()
    yield server, made.authority
    server.stop()


def test_tls_is_checked_against_the_authority_that_the_environment_names(
    tls: tuple[s3.OwnServer, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    server, authority = tls
    stranger = s3_store(server.url("p"), server.environment)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    friend = s3_store(server.url("p"), server.environment)

    assert friend.address.endpoint.startswith("https://")
    friend.probe()
    friend.put_bytes("large", bytes(2 * MIB))
    assert friend.fetch("large", tmp_path / "scratch").stat().st_size == 2 * MIB
    for act in (lambda: stranger.put_bytes("a", b"x"), lambda: stranger.put_bytes("large", bytes(2 * MIB))):
        with pytest.raises(StoreRefused, match="certificate"):
            act()


# -- downloads by URL


def test_a_presigned_url_serves_its_own_key_for_its_own_time(bucket_store: S3Store):
    bucket_store.put_bytes("t/one", b"first")
    bucket_store.put_bytes("t/two", b"second")

    url = bucket_store.download_url("t/one", 90, "drafter \n'x'.bin")
    served = urllib3.request("GET", url)

    assert served.data == b"first"
    assert "X-Amz-Expires=90" in url
    assert "attachment" in served.headers["Content-Disposition"]
    assert urllib3.request("GET", url.replace("t/one", "t/two")).status == 403
    assert urllib3.request("GET", url.replace("X-Amz-Expires=90", "X-Amz-Expires=9000")).status == 403
    assert urllib3.request("PUT", url, body=b"mine").status == 403


def test_a_public_address_is_what_presigned_urls_name(server: s3.S3Server):
    store = s3_store(server.url("p", public_endpoint="https://files.example"), server.environment)

    assert store.download_url("t/one", 60, "one").startswith("https://files.example/")


# -- what is left behind


def test_uploads_that_never_ended_are_aborted_once_they_are_old(bucket_store: S3Store, server: s3.S3Server):
    if server.kind == "rclone":
        pytest.skip("it does not list uploads, and forgets them when it is started again")
    client, bucket = bucket_store.client, bucket_store.address.bucket
    for name in ("t/dead", "t/dead-too"):
        client._create_multipart_upload(
            bucket_name=bucket, object_name=bucket_store.address.object_name(name), headers={}
        )
    bucket_store.put_bytes("t/alive", b"x")

    assert bucket_store.abort_stale_uploads(3600) == 0
    assert bucket_store.abort_stale_uploads(-5) == 2
    assert bucket_store.abort_stale_uploads(-5) == 0
    assert [s.key for s in bucket_store.list("")] == ["t/alive"]


def test_uploads_of_others_in_the_bucket_are_left_alone(server: s3.S3Server):
    if server.kind == "rclone":
        pytest.skip("it does not list uploads")
    ours, theirs = (s3_store(server.url(f"test-{secrets.token_hex(8)}"), server.environment) for _ in range(2))
    theirs.client._create_multipart_upload(
        bucket_name=theirs.address.bucket, object_name=theirs.address.object_name("x"), headers={}
    )

    assert ours.abort_stale_uploads(-5) == 0
    assert theirs.abort_stale_uploads(-5) == 1


def test_a_deletion_takes_every_version_away(tmp_path: Path):
    if "versitygw" not in s3.kinds():
        pytest.skip("versitygw is the server that keeps versions here, and there is no Go to build it")
    server = s3.OwnServer("versitygw", tmp_path, versions=True)
    server.start()
    try:
        store = s3_store(server.url("p"), server.environment)
        bucket = store.address.bucket
        store.client.set_bucket_versioning(bucket_name=bucket, config=VersioningConfig(ENABLED))
        for text in (b"one", b"two"):
            store.put_bytes("t/states", text)
        store.put_bytes("t/states-2", b"other")
        assert store.probe().versions

        store.delete("t/states")

        left = store.client.list_objects(bucket_name=bucket, recursive=True, include_version=True)
        assert [(entry.object_name, entry.is_delete_marker) for entry in left] == [("p/t/states-2", False)]
    finally:
        server.stop()


# -- room


def fill(store: S3Store, objects: int) -> None:
    for i in range(objects):
        store.put_bytes(f"t/{i}", bytes(MIB))


def test_a_disk_that_is_full_is_a_typed_failure(tmp_path: Path, small_disk: Callable[[int], Path]):
    if "versitygw" not in s3.kinds():
        pytest.skip("versitygw is the server that says so, and there is no Go to build it")
    server = s3.OwnServer("versitygw", small_disk(8 * MIB))
    server.start()
    try:
        store = s3_store(server.url("p"), server.environment)
        (tmp_path / "large").write_bytes(bytes(24 * MIB))

        with pytest.raises(StoreFull, match="no room"):
            store.put_file("t/large", tmp_path / "large")
        with pytest.raises(StoreFull, match="no room"):
            fill(store, 20)
        store.delete("t/0")
        store.put_bytes("t/small", b"x")
        assert store.get_bytes("t/small") == b"x"
    finally:
        server.stop()


# -- memory


MEASURE = """
import json, os, sys
from pathlib import Path
from eagle3_core.objects.s3 import s3_store

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10

store, folder, size = s3_store(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
small = folder / "small"
small.write_bytes(bytes(40 << 20))
store.put_file("warm", small)
store.fetch("warm", folder / "scratch")
with (folder / "large").open("wb") as file:
    file.truncate(size)
grown = {}
for what, act in (("put", lambda: store.put_file("large", folder / "large")), ("fetch", lambda: store.fetch("large", folder / "scratch"))):
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    act()
    grown[what] = peak() - before
print(json.dumps(grown))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_object(server: s3.S3Server, s3_place: str, tmp_path: Path):
    size = 400 * MIB
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, s3_place, str(tmp_path), str(size)], env=dict(server.environment) | {"PATH": ""},
        check=True, capture_output=True, text=True,
    )  # fmt: skip

    grown = json.loads(ran.stdout)
    assert grown["put"] < 128 * MIB, grown  # four parts of 16 MiB, and what the allocator keeps
    assert grown["fetch"] < 32 * MIB, grown


# -- a server that goes away


def test_a_server_that_is_restarted_is_waited_for(tmp_path: Path):
    server = s3.OwnServer(s3.kinds()[0], tmp_path)
    server.start()
    waits: list[float] = []

    def come_back(pause_s: float) -> None:
        waits.append(pause_s)
        if len(waits) == 2:
            server.start()

    store = S3Store(s3_address(server.url("p")), credentials_in(server.environment), retries=Retries(sleep=come_back))
    store.put_bytes("a", b"x")
    server.kill()
    try:
        assert store.get_bytes("a") == b"x"
        assert len(waits) == 2
    finally:
        server.stop()


def test_a_server_that_stays_away_is_a_failure_that_may_pass(tmp_path: Path):
    server = s3.OwnServer(s3.kinds()[0], tmp_path)
    store = S3Store(s3_address(server.url("p")), credentials_in(server.environment), retries=NO_RETRY)

    with pytest.raises(StoreUnavailable) as caught:
        store.get_bytes("a")
    assert caught.value.retryable


def test_store_at_takes_s3_urls(server: s3.S3Server, s3_place: str):
    store = store_at(s3_place, server.environment)
    store.put_bytes("a", b"x")

    assert isinstance(store, S3Store)
    assert store.get_bytes("a") == b"x"
    assert store.free_bytes() is None
