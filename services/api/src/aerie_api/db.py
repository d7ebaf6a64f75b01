"""The database: one process, one file, one writer at a time.

SQLite in WAL mode. A writing transaction begins with BEGIN IMMEDIATE, so what it read stays true until it commits,
and a lock file keeps a second API process out, which is what makes SQLite safe here. Sessions are the only thing that
services see: on Postgres they come from another engine, and rows that a service decides about are locked by
`with_for_update`, which SQLite does not need and ignores.

What a transaction wants told once it is committed (work to claim, news to read) is noted with `tell`, and said after
the commit and only then.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase, Session

from eagle3_core.errors import AerieError

Topic = Literal["work", "news"]
BUSY_TIMEOUT_S = 30.0


class DatabaseInUse(AerieError):
    """Another API process has the database open."""

    code, status = "database.in_use", 500


class Database:
    """Sessions on the file `path`, upgraded to the newest revision. Raises DatabaseInUse."""

    def __init__(self, path: Path, on_commit: Callable[[Topic], None] = lambda topic: None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_file = _lock(path)
        self._on_commit = on_commit
        self._one_writer = threading.Lock()
        self.engine = _engine(path)
        self._writer = self.engine.execution_options(aerie_begin="BEGIN IMMEDIATE")
        with self._writer.begin() as connection:
            upgrade(connection)

    @contextmanager
    def write(self) -> Generator[Session]:
        """A transaction that may write: committed at the end of the block, rolled back if it raises."""
        with self._one_writer, Session(self._writer, expire_on_commit=False) as session, session.begin():
            yield session
        for topic in sorted(session.info.get("topics", ())):
            self._on_commit(topic)

    @contextmanager
    def read(self) -> Generator[Session]:
        """A transaction that sees one state of the database and changes nothing."""
        with Session(self.engine, expire_on_commit=False) as session:
            yield session

    def close(self) -> None:
        """Close every connection and let the next process in."""
        self.engine.dispose()
        self._lock_file.close()


def tell(session: Session, topic: Topic) -> None:
    """Have `topic` said once the transaction of `session` is committed."""
    session.info.setdefault("topics", set()).add(topic)


def upsert(session: Session, table: type[DeclarativeBase]) -> sqlite.Insert | postgresql.Insert:
    """An INSERT into `table` that can say what to do on a conflict; both databases spell it the same way."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    return dialect.insert(table)


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Bring the schema to `revision`."""
    command.upgrade(_alembic(connection), revision)


def downgrade(connection: Connection, revision: str) -> None:
    """Take the schema back to `revision`."""
    command.downgrade(_alembic(connection), revision)


def _alembic(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    return config


def _engine(path: Path) -> Engine:
    engine = create_engine(
        f"sqlite:///{path}",
        # Transactions are begun below, by us: the driver would begin them late and deferred.
        connect_args={"isolation_level": None, "timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
        pool_size=16,
        max_overflow=64,
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("aerie_begin", "BEGIN"))

    return engine


def _lock(path: Path) -> IO[str]:
    lock = path.with_suffix(path.suffix + ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise DatabaseInUse(
            f"{path} is open in another API process: {holder}",
            remedy="stop that process, or give this one its own AERIE_DATA_DIR",
        ) from None
    lock.truncate(0)
    lock.write(json.dumps({"pid": os.getpid(), "since": time.time()}))
    lock.flush()
    return lock
