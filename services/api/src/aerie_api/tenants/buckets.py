"""How often a key may ask: a token bucket for each, in memory for one process, in the database for several.

A bucket holds `burst` tokens and fills at `per_minute`; a request takes one. On Postgres the buckets lie in an unlogged
table, so taking a token waits for no disk; a crash of the server empties the table, which only means full buckets.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import text

from aerie_api.db import Database

MAX_BUCKETS = 10_000


@dataclass(frozen=True)
class Rate:
    """`burst` requests at once, `per_minute` for long."""

    burst: int
    per_minute: float


@dataclass(frozen=True)
class Verdict:
    """Whether a request may pass, and what is left of the bucket."""

    allowed: bool
    tokens: float
    rate: Rate

    @property
    def retry_after_s(self) -> int:
        """Seconds until there is a token."""
        return max(1, math.ceil((1 - self.tokens) * 60 / self.rate.per_minute))

    @property
    def headers(self) -> dict[str, str]:
        """What the client is told of its bucket."""
        full_in_s = math.ceil((self.rate.burst - self.tokens) * 60 / self.rate.per_minute)
        window_s = math.ceil(self.rate.burst * 60 / self.rate.per_minute)
        return {
            "RateLimit-Limit": str(self.rate.burst),
            "RateLimit-Remaining": str(max(0, math.floor(self.tokens))),
            "RateLimit-Reset": str(max(0, full_in_s)),
            "RateLimit-Policy": f"{self.rate.burst};w={window_s}",
        }


class Buckets(Protocol):
    """Where tokens are taken from."""

    def take(self, key: str, rate: Rate) -> Verdict:
        """Take a token from the bucket of `key`, if it has one."""
        ...


class MemoryBuckets:
    """Buckets of one process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, key: str, rate: Rate) -> Verdict:
        """Take a token from the bucket of `key`, if it has one."""
        now = self._clock()
        with self._lock:
            tokens, at = self._buckets.pop(key, (float(rate.burst), now))
            tokens = min(rate.burst, tokens + max(0.0, now - at) * rate.per_minute / 60)
            allowed = tokens >= 1
            tokens -= allowed
            self._buckets[key] = (tokens, now)
            while len(self._buckets) > MAX_BUCKETS:  # the one that was asked for longest ago is the fullest
                del self._buckets[next(iter(self._buckets))]
        return Verdict(allowed, tokens, rate)


class DatabaseBuckets:
    """Buckets that several processes share, in Postgres."""

    def __init__(self, db: Database, clock: Callable[[], float]) -> None:
        self._db = db
        self._clock = clock

    def take(self, key: str, rate: Rate) -> Verdict:
        """Take a token from the bucket of `key`, if it has one."""
        given = {"key": key, "burst": rate.burst, "rate": rate.per_minute / 60, "now": self._clock()}
        with self._db.write() as session:
            tokens, allowed = session.execute(_TAKE, given).one()
        return Verdict(allowed, tokens, rate)


_FILLED = "LEAST(:burst, b.tokens + GREATEST(0, :now - b.at) * :rate)"
_TAKE = text(
    """
    INSERT INTO rate_buckets AS b (key, tokens, at, allowed) VALUES (:key, :burst - 1, :now, true)
    ON CONFLICT (key) DO UPDATE SET at = :now, allowed = FILLED >= 1,
        tokens = FILLED - CASE WHEN FILLED >= 1 THEN 1 ELSE 0 END
    RETURNING tokens, allowed
    """.replace("FILLED", _FILLED)
)
