"""What one API process committed wakes those who wait in the others: Postgres's LISTEN and NOTIFY.

A notice is part of the transaction that it is about, so nobody hears of what was rolled back. The listener has a
connection of its own. While it is cut off, notices are lost; so it says everything once whenever it is back, and bells
are hints anyway: whoever waits looks again after its time-out.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import threading
from collections.abc import Callable
from contextlib import closing

import psycopg
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

CHANNEL = "aerie"
QUIET_S = 30.0
"""Time without a notice after which the connection is tried."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
logger = logging.getLogger(__name__)


class Notices:
    """Sends this process's topics with its transactions, and hears those of the others on a thread of its own."""

    def __init__(self, engine: Engine, topics: tuple[str, ...], heard: Callable[[str], None]) -> None:
        _, self._connect = engine.dialect.create_connect_args(engine.url)
        self._topics = topics
        self._heard = heard
        self._self = secrets.token_hex(8)
        self._stopping = threading.Event()
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
        self._thread.start()

    def send(self, session: Session, topic: str) -> None:
        """Say `topic` to the other processes once the transaction of `session` is committed."""
        session.execute(
            text("SELECT pg_notify(:channel, :said)"), {"channel": CHANNEL, "said": f"{self._self}:{topic}"}
        )

    def close(self) -> None:
        """End."""
        self._stopping.set()
        self._stop.send(b"!")
        self._thread.join()
        self._stop.close()
        self._stopped.close()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            try:
                with closing(
                    psycopg.connect(**self._connect, autocommit=True, application_name="aerie_notices")
                ) as line:
                    line.execute(f'LISTEN "{CHANNEL}"')
                    pause_s = FIRST_PAUSE_S
                    for topic in self._topics:
                        self._heard(topic)
                    self._listen(line)
            except psycopg.Error as error:
                logger.warning("notices: cut off (%s); connecting again in %.1f s", _first_line(error), pause_s)
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _listen(self, line: psycopg.Connection) -> None:
        while not self._stopping.is_set():
            ready, _, _ = select.select([line.fileno(), self._stopped], [], [], QUIET_S)
            if not ready:
                line.execute("SELECT 1")
            for notice in line.notifies(timeout=0):
                sender, _, topic = notice.payload.partition(":")
                if sender != self._self and topic in self._topics:
                    self._heard(topic)


def _first_line(error: psycopg.Error) -> str:
    return str(error).strip().partition("\n")[0]
