"""Between worker and API: certificates are verified, and nothing crosses a network in clear text unless someone says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers.process import ServerProcess

from aerie_api.settings import TlsIncomplete, read_settings
from aerie_worker import __main__ as worker
from aerie_worker.claim import Control, Untrusted
from eagle3_core.addresses import PlainHttpRefused
from eagle3_core.jobs.refusals import Unreachable

slow = pytest.mark.slow


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def certificate(folder: Path, name: str, *, signed_by: str | None = None) -> Path:
    """A certificate for 127.0.0.1 (NAME.pem, NAME.key), its own authority unless `signed_by` another."""
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    authority = (
        ["-CA", str(folder / f"{signed_by}.pem"), "-CAkey", str(folder / f"{signed_by}.key")] if signed_by else []
    )
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", *names,
            *authority, "-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem"))  # fmt: skip
    return folder / f"{name}.pem"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    certificate(folder, "authority")
    certificate(folder, "api", signed_by="authority")
    certificate(folder, "stranger")
    return folder


@pytest.fixture(scope="module")
def api(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """An API that speaks https: its address and its worker token."""
    folder = tmp_path_factory.mktemp("api")
    told = folder / "run" / "server.json"
    environment = {
        "AERIE_RUN_DIR": str(told.parent), "AERIE_DATA_DIR": str(folder / "data"),
        "AERIE_TLS_CERT": str(keys / "api.pem"), "AERIE_TLS_KEY": str(keys / "api.key"),
    }  # fmt: skip
    server = ServerProcess("api", [sys.executable, "-m", "aerie_api"], folder / "log", told.exists, environment)
    server.start()
    yield json.loads(told.read_text())["url"], (told.parent / "worker.token").read_text().strip()
    server.stop()


@pytest.fixture
def control(api: tuple[str, str]) -> Iterator[Callable[..., Control]]:
    """Builds a worker's end of the line, closed with the test."""
    opened: list[Control] = []

    def open_one(ca: Path | None, url: str | None = None) -> Control:
        opened.append(Control(url or api[0], api[1], "w1", "i1", ["prep"], ca))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@slow
def test_a_worker_that_knows_the_authority_is_served(api, control, keys):
    assert api[0].startswith("https://")
    assert control(keys / "authority.pem").claim(0) is None


@slow
@pytest.mark.parametrize("ca", [None, "stranger.pem"])
def test_an_api_that_the_authority_did_not_sign_is_told_nothing(control, keys, ca):
    with pytest.raises(Untrusted, match="not trusted") as refused:
        control(keys / ca if ca else None).claim(0)
    assert "AERIE_API_CA" in refused.value.remedy


@slow
def test_a_certificate_for_another_name_is_not_trusted(api, control, keys):
    with pytest.raises(Untrusted, match="mismatch"):
        control(keys / "authority.pem", api[0].replace("127.0.0.1", "localhost")).claim(0)


@slow
def test_plain_http_to_an_https_api_gets_nothing(api, control):
    with pytest.raises(Unreachable):
        control(None, api[0].replace("https", "http")).claim(0)


@slow
def test_a_worker_that_does_not_trust_the_api_says_so_and_ends(api, keys, tmp_path):
    (tmp_path / "token").write_text(api[1])
    environment = {
        **os.environ, "AERIE_WORKER_TOKEN_FILE": str(tmp_path / "token"), "AERIE_STORE": tmp_path.as_uri(),
        "AERIE_API_CA": str(keys / "stranger.pem"),
    }  # fmt: skip
    command = [sys.executable, "-m", "aerie_worker", "--url", api[0], "--no-preload"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "api.untrusted" in ended.stderr
    assert api[1] not in ended.stderr


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://127.0.0.1:80", True), ("http://localhost:80", True), ("http://[::1]:80", True),
        ("https://api.example:443", True), ("http://api.example:80", False), ("http://10.0.0.1:80", False),
        ("http://127.0.0.1.example:80", False),
    ],
)  # fmt: skip
def test_a_worker_sends_its_token_in_clear_text_only_to_its_own_machine(url, allowed):
    if allowed:
        worker.check_transport(url, {})
    else:
        with pytest.raises(PlainHttpRefused):
            worker.check_transport(url, {})
    worker.check_transport(url, {"AERIE_ALLOW_PLAIN_HTTP": "1"})


def test_an_api_off_loopback_needs_a_certificate_or_word_that_something_else_encrypts(monkeypatch):
    monkeypatch.setenv("AERIE_HOST", "0.0.0.0")
    with pytest.raises(PlainHttpRefused, match="clear text"):
        read_settings()
    monkeypatch.setenv("AERIE_ALLOW_PLAIN_HTTP", "1")
    assert not read_settings().loopback
    monkeypatch.delenv("AERIE_ALLOW_PLAIN_HTTP")
    monkeypatch.setenv("AERIE_TLS_CERT", "/c.pem")
    with pytest.raises(TlsIncomplete, match="AERIE_TLS_KEY is not set"):
        read_settings()
    monkeypatch.setenv("AERIE_TLS_KEY", "/c.key")
    assert str(read_settings().tls_cert) == "/c.pem"


@slow
@pytest.mark.parametrize("key", ["stranger.key", "missing.key"])
def test_an_api_whose_certificate_cannot_be_used_says_so_and_ends(keys, key, tmp_path):
    environment = {
        **os.environ, "AERIE_RUN_DIR": str(tmp_path / "run"), "AERIE_DATA_DIR": str(tmp_path / "data"),
        "AERIE_TLS_CERT": str(keys / "api.pem"), "AERIE_TLS_KEY": str(keys / key),
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "aerie_api"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2
    assert "settings.tls" in ended.stderr
