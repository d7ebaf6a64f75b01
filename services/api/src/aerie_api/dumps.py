"""One consistent picture of the database as a file, and back: by the database's own programs, never by ours.

Postgres: `pg_dump` and `pg_restore`, of the server's version or newer, found on PATH. SQLite: its online backup, which may
run beside the API. The password goes to a child in its environment, never on its command line.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

from sqlalchemy import URL, create_engine, inspect

from aerie_api.engines import sqlite_engine
from eagle3_core.errors import AerieError

DUMPS = ("pg_dump", "--format=custom", "--no-owner", "--no-privileges")
LOADS = ("pg_restore", "--exit-on-error", "--single-transaction", "--no-owner", "--no-privileges")


class ProgramMissing(AerieError):
    """A program of Postgres is not on this machine."""

    code, status = "backup.program", 500


class DumpFailed(AerieError):
    """The database could not be written to a file, or read from it."""

    code, status = "backup.database", 500


class DatabaseNotEmpty(AerieError):
    """A backup is only restored into an empty database."""

    code, status = "backup.not_empty", 409


def dump(place: Path | URL, file: Path) -> None:
    """Write what `place` holds now to `file`. Raises ProgramMissing, DumpFailed."""
    if isinstance(place, URL):
        return _run(place, [*DUMPS, f"--file={file}"])
    try:
        with (
            closing(sqlite3.connect(f"{place.absolute().as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(file)) as target,
        ):
            source.backup(target)
    except sqlite3.Error as error:
        raise DumpFailed(f"{place}: {error}", remedy="see that the file is there and whole") from None
    return None


def load(place: Path | URL, file: Path) -> None:
    """Fill the empty `place` from `file`. Raises DatabaseNotEmpty, ProgramMissing, DumpFailed."""
    require_empty(place)
    if isinstance(place, URL):
        return _run(place, [*LOADS, str(file)])
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.restored")
    shutil.copyfile(file, temporary)
    temporary.replace(place)
    return None


def require_empty(place: Path | URL) -> None:
    """Raise DatabaseNotEmpty if there are tables at `place`."""
    if not isinstance(place, URL) and not place.exists():
        return
    engine = create_engine(place) if isinstance(place, URL) else sqlite_engine(place)
    try:
        with engine.connect() as connection:
            tables = inspect(connection).get_table_names()
    finally:
        engine.dispose()
    if tables:
        named = engine.url.render_as_string(hide_password=True)
        raise DatabaseNotEmpty(
            f"{named} has {len(tables)} tables, {tables[0]} among them: what is there would be lost",
            remedy="name an empty database (AERIE_DATABASE_URL, AERIE_DATA_DIR), or move this one away yourself",
        )


def _run(place: URL, command: list[str]) -> None:
    name = place.set(drivername="postgresql", password=None).render_as_string(hide_password=False)
    program = shutil.which(command[0])
    if program is None:
        raise ProgramMissing(
            f"{command[0]} is not on PATH",
            remedy="install PostgreSQL's client programs, of the server's version or newer",
        )
    password = {"PGPASSWORD": str(place.password)} if place.password else {}
    ran = subprocess.run(  # noqa: S603 - the command is ours
        [program, f"--dbname={name}", *command[1:]], env={**os.environ, **password}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False,
    )  # fmt: skip
    if ran.returncode:
        raise DumpFailed(
            f"{command[0]} ended with exit status {ran.returncode}: {ran.stderr.strip()[-2000:]}",
            remedy="see what it says; its version must not be older than the server's",
        )
