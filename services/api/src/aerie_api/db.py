"""Sessions on the one database that holds the truth: SQLite for one process, Postgres for as many as are needed.

What a writing transaction read must stay true until it commits. On SQLite a lock lets one writer at a time in, and its
transaction begins with BEGIN IMMEDIATE. On Postgres writers run beside each other, and every service locks the rows that
it decides about: the job first (`JobRepository.locked`), then what belongs to it, so that no two writers wait for each
other in a circle. Where that cannot be kept, Postgres ends one of them and the request is run again, whole (`guards`).

What a transaction wants told once it is committed (work to claim, news to read, room to look for) is noted with `tell`, and said after
the commit and only then: in this process, and on Postgres in all of them (`notices`).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal, get_args

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Session

from aerie_api.engines import DatabaseAway, lock_file, postgres_engine, sqlite_engine
from aerie_api.notices import Notices

Topic = Literal["work", "news", "stops", "room"]
START_PATIENCE_S = 60.0
"""How long a starting process waits for Postgres to answer."""
logger = logging.getLogger(__name__)


class Database:
    """Sessions on `place` (a SQLite file, or the URL of a Postgres database), upgraded to the newest revision.

    Raises DatabaseInUse (a SQLite file that another process has open), DatabaseAway (Postgres does not answer).
    """

    def __init__(
        self, place: Path | URL, on_commit: Callable[[Topic], None] = lambda topic: None, connections: int = 20
    ) -> None:
        self._on_commit = on_commit
        self.shared = isinstance(place, URL)
        """Whether other API processes may have it open too."""
        self._notices: Notices | None = None
        if isinstance(place, URL):
            self.engine = postgres_engine(place, connections)
            self._one_writer = nullcontext()
            self._writer = self.engine.execution_options(isolation_level="READ COMMITTED")
            self._reader = self.engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            self._migrate_patiently()
            self._notices = Notices(self.engine, get_args(Topic), lambda topic: on_commit(topic))  # type: ignore[arg-type]
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            self._lock_file = lock_file(place)
            self.engine = self._reader = sqlite_engine(place)
            self._one_writer = threading.Lock()
            self._writer = self.engine.execution_options(aerie_begin="BEGIN IMMEDIATE")
            self._migrate()

    def _migrate_patiently(self) -> None:
        deadline = time.monotonic() + START_PATIENCE_S
        while True:
            try:
                return self._migrate()
            except OperationalError as error:
                why = str(error.orig).strip().partition("\n")[0]
                if time.monotonic() > deadline:
                    raise DatabaseAway(
                        f"{self.engine.url.render_as_string(hide_password=True)}: {why}",
                        remedy="start Postgres, or correct AERIE_DATABASE_URL and the password",
                    ) from None
                logger.warning("waiting for Postgres: %s", why)
                time.sleep(1.0)

    def _migrate(self) -> None:
        with self._writer.begin() as connection:
            if self.shared:  # one process migrates, the others wait for it; a migration may take as long as it needs
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text("SET LOCAL lock_timeout = 0"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": lock_number("migrations")})
            upgrade(connection)

    @contextmanager
    def write(self) -> Generator[Session]:
        """A transaction that may write: committed at the end of the block, rolled back if it raises."""
        with self._one_writer, Session(self._writer, expire_on_commit=False) as session, session.begin():
            yield session
            topics: list[Topic] = sorted(session.info.get("topics", ()))
            if self._notices is not None:
                for topic in topics:
                    self._notices.send(session, topic)
        for topic in topics:
            self._on_commit(topic)

    @contextmanager
    def read(self) -> Generator[Session]:
        """A transaction that sees one state of the database and changes nothing."""
        with Session(self._reader, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def alone(self, what: str) -> Generator[bool]:
        """Whether this process alone, of all that share the database, is in a block called `what`."""
        if not self.shared:
            yield True
            return
        with Session(self._writer) as session, session.begin():
            session.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
            taken = session.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": lock_number(what)})
            yield bool(taken)

    def close(self) -> None:
        """Close every connection and let the next process in."""
        if self._notices is not None:
            self._notices.close()
        self.engine.dispose()
        if not self.shared:
            self._lock_file.close()


def lock_number(what: str) -> int:
    """The key of the advisory lock called `what`: 63 bits of a hash, so that names need no registry."""
    return int.from_bytes(hashlib.sha256(f"aerie {what}".encode()).digest()[:8]) >> 1


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
