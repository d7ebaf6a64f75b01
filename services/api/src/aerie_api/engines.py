"""How each database is opened: SQLite for one process, Postgres for many.

SQLite: WAL, foreign keys, a full sync at each commit, and a lock file that keeps a second process out, which is what
makes it safe here. Postgres: every connection is tested before it is lent, gives up on a statement after 30 s and on a
lock after 10 s (a client is better served by 503 and another try than by a thread that hangs), and notices within a
minute when the other side is gone without a word.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from pathlib import Path
from typing import IO, Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from eagle3_core.errors import AerieError

BUSY_TIMEOUT_S = 30.0
STATEMENT_TIMEOUT_S, LOCK_TIMEOUT_S, IDLE_IN_TRANSACTION_S = 30, 10, 60
POOL_WAIT_S = 10.0
LARGEST_NUMBER = (1 << 31) - 1
"""Of a column of whole numbers: Postgres answers a comparison with more by an error."""
_DEADLOCK, _SERIALISATION = "40P01", "40001"
_GAVE_UP = {"55P03": "a lock", "57014": "a statement", "25P03": "a transaction"}
"""SQLSTATEs of what our own time-outs end."""


class DatabaseInUse(AerieError):
    """Another API process has the database open."""

    code, status = "database.in_use", 409


class DatabaseAway(AerieError):
    """The database does not answer."""

    code, status, retryable = "database.away", 503, True


class DatabaseBusy(AerieError):
    """The database took too long."""

    code, status, retryable = "database.busy", 503, True


class DatabaseStorage(AerieError):
    """The database's disk or file does not take what is written to it."""

    code, status, retryable = "database.storage", 503, True


_STORAGE = {
    "SQLITE_FULL": ("its disk is full", "free disk space; the API goes on by itself, and what was confirmed is kept"),
    "SQLITE_READONLY": ("its file can no longer be written, or was moved away or deleted", "give the file back and make it "
                        "writable, then restart the API; where it is lost, restarting begins with an empty database"),
    "SQLITE_IOERR": ("its disk fails, or its folder is gone", "look after the disk and the folder, then restart the API"),
    "SQLITE_CANTOPEN": ("its file cannot be opened", "look after the house's folder and its permissions, then restart the API"),
}  # fmt: skip
"""SQLite's primary result codes for what is no mistake of ours: what to say of the database, and what to do."""


def sqlite_engine(path: Path) -> Engine:
    """An engine on the file `path`. Transactions are begun by us: the driver would begin them late and deferred."""
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        connect_args={"isolation_level": None, "timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
        pool_size=16,
        max_overflow=64,
    )

    opened: list[os.stat_result] = []

    def require_in_place() -> None:
        """Linux lets us write to a file that was deleted or replaced: all would go well, and be gone with this process."""
        if opened and not _same_file(path, opened[0]):
            moved = sqlite3.OperationalError(f"{path} is not the file that was opened")
            moved.sqlite_errorname = "SQLITE_READONLY_DBMOVED"  # SQLite's own name for it; in WAL mode it does not look
            raise OperationalError("BEGIN", None, moved)

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        require_in_place()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")
        opened.append(path.stat())

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        require_in_place()
        connection.exec_driver_sql(connection.get_execution_options().get("aerie_begin", "BEGIN"))

    return engine


def _same_file(path: Path, opened: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), opened)
    except OSError:
        return False


def postgres_engine(url: URL, connections: int) -> Engine:
    """An engine on the server at `url` that opens at most `connections`."""
    limits = {
        "statement_timeout": STATEMENT_TIMEOUT_S,
        "lock_timeout": LOCK_TIMEOUT_S,
        "idle_in_transaction_session_timeout": IDLE_IN_TRANSACTION_S,
    }
    return create_engine(
        url,
        connect_args={
            **PATIENCE,
            "application_name": "aerie_api",
            "options": " ".join(f"-c {name}={seconds}s" for name, seconds in limits.items()),
        },
        pool_pre_ping=True,
        pool_size=connections,
        max_overflow=0,
        pool_timeout=POOL_WAIT_S,
        pool_recycle=1800,
    )


PATIENCE: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""How long a silent network is believed."""


def worth_repeating(error: SQLAlchemyError) -> bool:
    """Whether the transaction was given up in favour of another one, so that the same again will do."""
    return isinstance(error, DBAPIError) and _state(error) in (_DEADLOCK, _SERIALISATION)


def unavailable(error: SQLAlchemyError) -> AerieError | None:
    """What a client is told when `error` means that the database is away or too slow; None when it means a mistake.

    If the connection broke while a commit was under way, nobody knows whether it counts. Every write may be sent again
    all the same: workers' writes carry their fence, and posts their Idempotency-Key.
    """
    if isinstance(error, PoolTimeout):
        return DatabaseBusy(
            f"no database connection came free within {POOL_WAIT_S:.0f} s",
            remedy="ask again; if it stays so, run more API processes, or raise AERIE_DATABASE_CONNECTIONS",
        )
    if not isinstance(error, DBAPIError):
        return None
    named = "_".join(str(getattr(error.orig, "sqlite_errorname", "")).split("_")[:2])
    if named in _STORAGE:
        why, remedy = _STORAGE[named]
        return DatabaseStorage(f"the database cannot be written: {why}", remedy=remedy)
    state = _state(error)
    if state in _GAVE_UP or "database is locked" in str(error.orig):
        return DatabaseBusy(f"{_GAVE_UP.get(state, 'a lock')} took too long in the database", remedy="ask again")
    if error.connection_invalidated or state[:2] in ("08", "57", "53") or _never_connected(error):
        return DatabaseAway("the database does not answer", remedy="ask again; if it stays so, start it: see /readyz")
    return DatabaseBusy("too many writers met", remedy="ask again") if worth_repeating(error) else None


def in_short(error: Exception) -> str:
    """What `error` of a database or a disk means, for people who look after them."""
    told = unavailable(error) if isinstance(error, SQLAlchemyError) else None
    return told.detail if told is not None else f"{type(error).__name__}: {error}".partition("\n")[0]


def _never_connected(error: DBAPIError) -> bool:
    """Whether Postgres refused or missed the connection: libpq gives such errors no SQLSTATE."""
    return type(error.orig).__module__.startswith("psycopg") and type(error.orig).__name__ == "OperationalError"


def _state(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", None) or "")


def lock_file(path: Path) -> IO[str]:
    """The lock beside the SQLite file `path`, held. Raises DatabaseInUse."""
    lock = path.with_suffix(path.suffix + ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise DatabaseInUse(
            f"{path} is open in another API process: {holder}",
            remedy="stop that process, give this one its own AERIE_DATA_DIR, "
            "or set AERIE_DATABASE_URL to a Postgres server, which several may share",
        ) from None
    lock.truncate(0)
    lock.write(json.dumps({"pid": os.getpid(), "since": time.time()}))
    lock.flush()
    return lock
