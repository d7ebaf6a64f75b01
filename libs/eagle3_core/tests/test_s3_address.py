"""Which store a URL names, who this process is to it, and when a request is asked again. No server needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from urllib3.exceptions import ProtocolError

from eagle3_core.objects.location import store_at
from eagle3_core.objects.protocol import ObjectMissing, StoreRefused, StoreUnavailable
from eagle3_core.objects.retry import Retries, Verdict
from eagle3_core.objects.s3_address import BadStoreUrl, s3_address
from eagle3_core.objects.s3_credentials import credentials_in
from eagle3_core.objects.s3_errors import verdict

# -- addresses


def test_a_url_names_bucket_prefix_server_and_encryption():
    place = s3_address("s3://states/team-a/1?endpoint=https://minio.example:9000&region=eu-west-1&sse=aws:kms:key-1")

    assert (place.bucket, place.prefix, place.endpoint) == ("states", "team-a/1/", "https://minio.example:9000")
    assert (place.region, place.encryption, place.virtual_host) == ("eu-west-1", "aws:kms:key-1", False)
    assert place.object_name("a/b") == "team-a/1/a/b"


def test_without_an_endpoint_it_is_aws_over_tls():
    place = s3_address("s3://states?region=eu-west-1")

    assert (place.endpoint, place.virtual_host, place.prefix) == ("https://s3.eu-west-1.amazonaws.com", True, "")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.8.9.1"])
def test_plain_http_is_for_this_machine(host: str):
    assert s3_address(f"s3://states?endpoint=http://{host}:9000").endpoint == f"http://{host}:9000"


@pytest.mark.parametrize("host", ["minio", "10.0.0.1", "localhost.example", "127.0.0.1.example", "[fe80::1]"])
def test_plain_http_to_others_needs_somebodys_word(host: str):
    with pytest.raises(BadStoreUrl, match="unencrypted"):
        s3_address(f"s3://states?endpoint=http://{host}:9000")
    assert not s3_address(f"s3://states?endpoint=http://{host}:9000&plain_http=allowed").trusted


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:sesame@states", "s3://sesame@states/p", "s3://states?endpoint=https://key:sesame@minio",
        "s3://states?access_key=a&secret_key=sesame", "s3://states?X-Amz-Signature=sesame", "s3://states#sesame",
        "s3://states?public_endpoint=https://sesame@minio",
    ],
)  # fmt: skip
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str):
    with pytest.raises(BadStoreUrl) as caught:
        store_at(url, {"AERIE_S3_ACCESS_KEY": "k", "AERIE_S3_SECRET_KEY": "s"})

    assert "sesame" not in caught.value.text()


@pytest.mark.parametrize(
    "url",
    [
        "s3://", "s3:///prefix", "s3://UPPER", "s3://a", "s3://states/../x", "s3://states/%2e%2e/x", "s3://states/a b",
        "s3://states?endpoint=minio:9000", "s3://states?endpoint=https://minio/path", "s3://states?endpoint=ftp://minio",
        "s3://states?endpoint=https://minio:port", "s3://states?region=a&region=b", "s3://states?region=EU WEST",
        "s3://states?sse=none", "s3://states?sse=aws:kms", "s3://states?plain_http=yes", "s3://states?style=odd", "s3://[::1",
        "s3://states?endpoint=https://mi\nnio", "s3://states?endpoint=https://a@b@c", "s3://states?endpoint=https://x?y=z",
    ],
)  # fmt: skip
def test_what_is_no_store_is_refused(url: str):
    with pytest.raises(BadStoreUrl) as caught:
        s3_address(url)

    assert caught.value.remedy


@given(st.text(max_size=60))
def test_any_text_is_a_store_or_a_typed_refusal(text: str):
    try:
        place = s3_address("s3://" + text)
    except BadStoreUrl:
        return
    assert place.tls or place.loopback or "plain_http=allowed" in text
    assert ".." not in place.prefix.split("/")


# -- credentials


def test_credentials_come_from_files_before_the_environment_before_aws(tmp_path: Path):
    (tmp_path / "access").write_text("file-access\n")
    (tmp_path / "secret").write_text(" file-secret\n")
    aws = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_SESSION_TOKEN": "t"}
    own = {"AERIE_S3_ACCESS_KEY": "c", "AERIE_S3_SECRET_KEY": "d"}
    files = {f"AERIE_S3_{w.upper()}_KEY_FILE": str(tmp_path / w) for w in ("access", "secret")}

    found = [credentials_in(env).retrieve() for env in (aws, aws | own, aws | own | files)]

    assert [(f.access_key, f.secret_key, f.session_token) for f in found] == [
        ("a", "b", "t"), ("c", "d", None), ("file-access", "file-secret", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "no credentials"),
        ({"AERIE_S3_ACCESS_KEY": "a"}, "half"),
        ({"AWS_SECRET_ACCESS_KEY": "sesame"}, "half"),
        ({"AERIE_S3_SECRET_KEY_FILE": "/nowhere"}, "half"),
        ({"AERIE_S3_ACCESS_KEY_FILE": "/nowhere", "AERIE_S3_SECRET_KEY_FILE": "/nowhere"}, "/nowhere cannot be read"),
        ({"AERIE_S3_ACCESS_KEY_FILE": "/dev/null", "AERIE_S3_SECRET_KEY_FILE": "/dev/null"}, "empty"),
    ],
)
def test_missing_credentials_are_said_without_secrets(environment: dict[str, str], says: str):
    with pytest.raises(StoreRefused, match=says) as caught:
        credentials_in(environment)

    assert "sesame" not in caught.value.text()
    assert "AERIE_S3" in caught.value.remedy or "AWS_" in caught.value.remedy or "file" in caught.value.remedy


def test_credentials_print_themselves_without_themselves():
    found = credentials_in({"AERIE_S3_ACCESS_KEY": "a", "AERIE_S3_SECRET_KEY": "sesame"})
    found.retrieve()

    assert "sesame" not in f"{found} {found!r}"


def test_a_role_of_aws_is_taken_where_the_environment_has_one(tmp_path: Path):
    assert credentials_in({"AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token")}).source == "AWS role"


# -- trying again


def passing(failure: Exception) -> Verdict | None:
    return verdict(failure, "GET o")


def test_what_may_pass_is_asked_again_after_growing_pauses_that_are_drawn():
    pauses: list[float] = []
    drawn: list[tuple[float, float]] = []

    def draw(low: float, high: float) -> float:
        drawn.append((low, high))
        return high / 2

    answers = iter(
        [ProtocolError("reset"), TimeoutError("slow"), ConnectionResetError(), ProtocolError("cut"), b"here"]
    )

    def ask() -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    retries = Retries(base_s=1.0, longest_s=4.0, sleep=pauses.append, draw=draw)

    assert retries(ask, passing) == b"here"
    assert drawn == [(0.0, 1.0), (0.0, 2.0), (0.0, 4.0), (0.0, 4.0)]
    assert pauses == [0.5, 1.0, 2.0, 2.0]


def test_asking_ends_with_a_typed_failure_and_its_cause():
    asked: list[int] = []

    def ask() -> None:
        asked.append(1)
        raise ProtocolError("reset by peer")

    with pytest.raises(StoreUnavailable, match="reset by peer") as caught:
        Retries(attempts=3, sleep=lambda _: None)(ask, passing)

    assert len(asked) == 3
    assert isinstance(caught.value.__cause__, ProtocolError)


@pytest.mark.parametrize("failure", [ObjectMissing("gone"), KeyError("ours"), ZeroDivisionError()])
def test_what_is_final_and_what_is_our_own_fault_is_raised_at_once(failure: Exception):
    asked: list[int] = []

    def ask() -> None:
        asked.append(1)
        raise failure

    with pytest.raises(type(failure)):
        Retries(sleep=lambda _: None)(ask, passing)
    assert len(asked) == 1
