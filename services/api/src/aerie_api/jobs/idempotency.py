"""The same POST twice makes one job: an Idempotency-Key remembers its first answer for a day.

A key stands for one body. The same key and body get the first answer again; another body is refused, and so is a
second request while the first is still at work. Only successes are remembered: a refused request did nothing, so it
may be corrected and sent again under the same key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from aerie_api.db import Database
from aerie_api.jobs.repository import TENANT
from aerie_api.tables import IdempotencyRow
from eagle3_core.digests import digest_bytes
from eagle3_core.errors import AerieError


class BadKey(AerieError):
    """The Idempotency-Key is not usable."""

    code, status = "idempotency.key", 400


class KeyMismatch(AerieError):
    """The Idempotency-Key was used for another body."""

    code, status = "idempotency.mismatch", 422


class KeyInFlight(AerieError):
    """The first request with this Idempotency-Key is still at work."""

    code, status, retryable = "idempotency.in_flight", 409, True


class Idempotency:
    """Keys and their answers."""

    def __init__(self, db: Database, keep_s: float, clock: Callable[[], float]) -> None:
        self._db = db
        self._keep_s = keep_s
        self._clock = clock

    def begin(self, key: str, body: bytes) -> dict[str, Any] | None:
        """The answer to replay, or None: then the caller does the work. Raises BadKey, KeyMismatch, KeyInFlight."""
        if not (0 < len(key) <= 255 and key.isascii() and key.isprintable()):
            raise BadKey("an Idempotency-Key has 1 to 255 printable ASCII characters", remedy="use a UUID")
        now, digest = self._clock(), digest_bytes(body)
        with self._db.write() as session:
            row = session.get(IdempotencyRow, (TENANT, key))
            if row is not None and row.created_at < now - self._keep_s:
                session.delete(row)
                session.flush()
                row = None
            if row is None:
                session.add(IdempotencyRow(tenant=TENANT, key=key, body_hash=digest, response=None, created_at=now))
                return None
            if row.body_hash != digest:
                raise KeyMismatch("the key stands for another body", remedy="use a new key for a new job")
            if row.response is None:
                raise KeyInFlight("the first request with this key is still at work", remedy="wait and ask again")
            return row.response

    def remember(self, session: Session, key: str, response: dict[str, Any]) -> None:
        """Keep the answer, in the transaction that did the work."""
        row = session.get_one(IdempotencyRow, (TENANT, key))
        row.response = response

    def forget(self, key: str) -> None:
        """The work was refused: let the key be used again."""
        with self._db.write() as session:
            unanswered = IdempotencyRow.response.is_(None)
            session.execute(
                delete(IdempotencyRow).where(IdempotencyRow.tenant == TENANT, IdempotencyRow.key == key, unanswered)
            )

    def sweep(self) -> None:
        """Forget keys that are too old."""
        too_old = IdempotencyRow.created_at < self._clock() - self._keep_s
        with self._db.read() as session:
            if session.scalar(select(IdempotencyRow.key).where(too_old).limit(1)) is None:
                return
        with self._db.write() as session:
            session.execute(delete(IdempotencyRow).where(too_old))

    def forget_unanswered(self) -> None:
        """Let go of keys whose request died with an earlier process."""
        with self._db.write() as session:
            session.execute(delete(IdempotencyRow).where(IdempotencyRow.response.is_(None)))
