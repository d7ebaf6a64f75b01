"""What several test modules share: stores, and a tiny job whose verifier a running server has.

Stores are a folder, and a prefix of its own on every real S3 server that this machine can run. Those servers are started
when first asked for, live for the session, and end with it.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from servers import s3

from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.protocol import ObjectStore
from eagle3_core.objects.s3 import S3Store, s3_store

if TYPE_CHECKING:
    from endpoint_house import House, Serve

Servers = Callable[[str], s3.S3Server]


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The session's server of a kind."""
    running: dict[str, s3.S3Server] = {}

    def server(kind: str) -> s3.S3Server:
        if kind not in running:
            running[kind] = s3.start(kind, tmp_path_factory.mktemp(kind))
        return running[kind]

    yield server
    for one in running.values():
        one.stop()


@pytest.fixture(params=s3.kinds())
def server(request: pytest.FixtureRequest, s3_server: Servers) -> s3.S3Server:
    """Every S3 server in turn."""
    return s3_server(request.param)


@pytest.fixture
def s3_place(server: s3.S3Server) -> str:
    """URL of a new prefix on that server."""
    return server.url(f"test-{secrets.token_hex(8)}")


@pytest.fixture
def bucket_store(server: s3.S3Server, s3_place: str) -> S3Store:
    """The store there."""
    return s3_store(s3_place, server.environment)


@pytest.fixture(params=["local", *s3.kinds()])
def store(request: pytest.FixtureRequest, s3_server: Servers, tmp_path: Path) -> ObjectStore:
    """Every kind of store in turn, empty."""
    if request.param == "local":
        return LocalStore(tmp_path / "store")
    server = s3_server(request.param)
    return s3_store(server.url(f"test-{secrets.token_hex(8)}"), server.environment)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes; gone after the test."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        asked = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(asked, capture_output=True, check=False).returncode:
            pytest.skip("only root may mount a small disk")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A tiny job, prepared, whose answers a server that a test starts will write."""
    from endpoint_house import House  # brings torch and transformers: most tests here need neither

    return House(tmp_path_factory.mktemp("house"))


@pytest.fixture
def serve(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts such a server, with the quirks that a test names."""
    with house.serving(monkeypatch) as start:
        yield start
