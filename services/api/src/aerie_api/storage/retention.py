"""Which hidden states are let go: the old, and the least used of those who are short of room.

Only hidden states go: they can be made again, and are by far the largest. Letting go changes the database alone; the
objects follow at the next collection. What a living job reads stays, whatever the need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from aerie_api.db import Database
from aerie_api.storage.repository import StorageRepository

STATES = ("extract",)
ROUND = 100


@dataclass(frozen=True)
class Keeping:
    """How long things are kept, in seconds and bytes."""

    grace_s: float
    checkpoint_grace_s: float
    states_s: float
    """Least time since their last use after which states are let go; 0 keeps them."""
    room_bytes: int
    """What must be free in a store that was full before jobs go on."""


class Retention:
    """Lets states go, by `keeping`."""

    def __init__(self, db: Database, keeping: Keeping, clock: Callable[[], float]) -> None:
        self._db, self._keeping, self._clock = db, keeping, clock

    def expire(self) -> int:
        """Let go of states that nobody used for as long as the operator keeps them; returns how many results."""
        if not self._keeping.states_s:
            return 0
        return self._let_go(None, lambda size: True, used_before=self._clock() - self._keeping.states_s)

    def shrink(self, tenant: str, excess_bytes: int) -> int:
        """Let go of the tenant's least used states until it holds `excess_bytes` less; returns how many results."""
        return self._let_go(tenant, lambda size: size < excess_bytes)

    def relieve(self, wanted_bytes: int) -> int:
        """Let go of the least used states of all tenants, as far as they are old enough to be collected at once."""
        return self._let_go(
            None, lambda size: size < wanted_bytes, made_before=self._clock() - self._keeping.grace_s - 1.0
        )

    def _let_go(
        self, tenant: str | None, wanted: Callable[[int], bool], used_before: float = inf, made_before: float = inf
    ) -> int:
        """Release idle states, the longest unused first, while more is `wanted` than the bytes that went so far."""
        released, size, passed_over = 0, 0, set[tuple[str, str]]()
        while wanted(size):
            with self._db.write() as session:
                repository = StorageRepository(session)
                idle = repository.idle(STATES, tenant, used_before, made_before, ROUND + len(passed_over))
                row = next((r for r in idle if (r.tenant, r.key) not in passed_over), None)
                if row is None:
                    return released
                if repository.release(row.tenant, row.key, self._clock()):
                    released, size = released + 1, size + (row.bytes or 0)
                else:
                    passed_over.add((row.tenant, row.key))
        return released
