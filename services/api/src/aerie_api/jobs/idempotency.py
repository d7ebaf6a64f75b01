"""The same POST twice makes one job: an Idempotency-Key remembers its first answer for a day.

A key stands for one body. The same key and body get the first answer again; another body is refused, and so is a
second request while the first is still at work. Only successes are remembered: a refused request did nothing, so it
may be corrected and sent again under the same key.

A request can die without a word, with its process. So a key whose request is at work belongs to an owner, who loses it
after `IN_FLIGHT_S` to the next one who asks; the answer, and with it the job, is stored only if the owner is still the
same. It is the rule of the leases again: two may work, one counts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import CursorResult, delete, select, update
from sqlalchemy.orm import Session

from aerie_api.db import Database, upsert
from aerie_api.tables import IdempotencyRow
from eagle3_core.digests import digest_bytes
from eagle3_core.errors import AerieError

IN_FLIGHT_S = 300.0
"""A request that has been at work for so long is taken for dead."""


class BadKey(AerieError):
    """The Idempotency-Key is not usable."""

    code, status = "idempotency.key", 400


class KeyMismatch(AerieError):
    """The Idempotency-Key was used for another body."""

    code, status = "idempotency.mismatch", 422


class KeyInFlight(AerieError):
    """The first request with this Idempotency-Key is still at work."""

    code, status, retryable = "idempotency.in_flight", 409, True


@dataclass(frozen=True)
class Owned:
    """A key that a request has, until somebody takes it for dead."""

    tenant: str
    key: str
    owner: str


class Idempotency:
    """Keys and their answers."""

    def __init__(self, db: Database, keep_s: float, clock: Callable[[], float]) -> None:
        self._db = db
        self._keep_s = keep_s
        self._clock = clock

    def begin(self, tenant: str, key: str, body: bytes) -> Owned | dict[str, Any]:
        """The answer to replay, or the key: then the caller does the work. Raises BadKey, KeyMismatch, KeyInFlight."""
        if not (0 < len(key) <= 255 and key.isascii() and key.isprintable()):
            raise BadKey("an Idempotency-Key has 1 to 255 printable ASCII characters", remedy="use a UUID")
        now, mine = self._clock(), Owned(tenant, key, secrets.token_hex(16))
        fresh = {"body_hash": digest_bytes(body), "owner": mine.owner, "response": None, "created_at": now}
        with self._db.write() as session:
            new = upsert(session, IdempotencyRow).values(tenant=tenant, key=key, **fresh).on_conflict_do_nothing()
            if session.scalar(new.returning(IdempotencyRow.key)) is not None:
                return mine
            row = session.scalar(_of(mine).with_for_update())
            if row is None:  # let go of between the two statements
                raise KeyInFlight("another request with this key has just ended", remedy="ask again")
            age_s = now - row.created_at
            if age_s > self._keep_s or (row.response is None and age_s > IN_FLIGHT_S):
                for name, value in fresh.items():
                    setattr(row, name, value)
                return mine
            if row.body_hash != fresh["body_hash"]:
                made = f", which became job {row.response['id']}" if row.response else ""
                raise KeyMismatch(f"the key stands for another body{made}", remedy="use a new key for a new job")
            if row.response is None:
                raise KeyInFlight("the first request with this key is still at work", remedy="wait and ask again")
            return row.response

    def remember(self, session: Session, mine: Owned, response: dict[str, Any]) -> None:
        """Keep the answer, in the transaction that did the work. Raises KeyInFlight when another request has the key."""
        kept = session.execute(_where(update(IdempotencyRow), mine).values(response=response))
        if not cast("CursorResult[Any]", kept).rowcount:
            raise KeyInFlight("this took so long that another request took over its key", remedy="ask again")

    def forget(self, mine: Owned) -> None:
        """The work was refused: let the key be used again."""
        with self._db.write() as session:
            session.execute(_where(delete(IdempotencyRow), mine))

    def sweep(self) -> None:
        """Forget keys that are too old."""
        too_old = IdempotencyRow.created_at < self._clock() - self._keep_s
        with self._db.read() as session:
            if session.scalar(select(IdempotencyRow.key).where(too_old).limit(1)) is None:
                return
        with self._db.write() as session:
            session.execute(delete(IdempotencyRow).where(too_old))

    def forget_unanswered(self) -> None:
        """Let go of keys whose request died with an earlier process; not if other processes may be at work on them."""
        if self._db.shared:
            return
        with self._db.write() as session:
            session.execute(delete(IdempotencyRow).where(IdempotencyRow.response.is_(None)))


def _of(mine: Owned) -> Any:
    return select(IdempotencyRow).where(IdempotencyRow.tenant == mine.tenant, IdempotencyRow.key == mine.key)


def _where(statement: Any, mine: Owned) -> Any:
    """`statement` about the key while `mine` has it and has not answered."""
    return statement.where(
        IdempotencyRow.tenant == mine.tenant,
        IdempotencyRow.key == mine.key,
        IdempotencyRow.owner == mine.owner,
        IdempotencyRow.response.is_(None),
    ).execution_options(synchronize_session=False)
