"""Keeps the store in order: what expired is let go, what nobody holds is collected, and who is short of room is said.

One process at a time does it, of however many run; two at once would do no harm. Collecting is refused where the store
carries another database's name: a new, empty database would take everything in it for garbage.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from aerie_api.db import Database
from aerie_api.jobs.repository import TENANT
from aerie_api.storage.deletions import Deletions
from aerie_api.storage.repository import StorageRepository
from aerie_api.storage.schemas import StorageUse
from eagle3_core.errors import AerieError
from eagle3_core.objects.collect import Collector, Holdings, Swept
from eagle3_core.objects.keys import HOUSE_PREFIX, Attempt, Owner
from eagle3_core.objects.protocol import ObjectStore

logger = logging.getLogger(__name__)
OWNERS = f"{HOUSE_PREFIX}owner/"
STATES = ("extract",)
"""What is let go when it is old or room is short: it can be made again, and is by far the largest."""
ROUND = 100


class StoreOwnedElsewhere(AerieError):
    """The store belongs to another database."""

    code, status = "storage.owner", 409


class OverBudget(AerieError):
    """The tenant's results hold more than its budget."""

    code, status = "store.full", 507


@dataclass(frozen=True)
class Keeping:
    """How long things are kept, in seconds and bytes."""

    grace_s: float
    checkpoint_grace_s: float
    states_s: float
    """Least time since their last use after which states are let go; 0 keeps them."""
    budget_bytes: int
    """What a tenant's results may hold; 0 is no limit."""


class StorageService:
    """The store's housekeeping, over one database."""

    def __init__(self, db: Database, store: ObjectStore, keeping: Keeping, clock: Callable[[], float]) -> None:
        self._db, self._store, self._keeping, self._clock = db, store, keeping, clock
        self._collector = Collector(store, self, grace_s=keeping.grace_s, checkpoint_grace_s=keeping.checkpoint_grace_s)
        self.deletions = Deletions(db, store, self._collector, clock)

    def about(self, owners: Collection[Owner]) -> Holdings:
        """What the database holds of `owners` now (`objects.collect.Truth`): one look at one state of it."""
        jobs = {owner.job_id for owner in owners if isinstance(owner, Attempt)}
        with self._db.read() as session:
            repository = StorageRepository(session)
            return Holdings(repository.committed(jobs), frozenset(repository.in_flight(owners)))

    def keep_order(self) -> Swept | None:
        """One round of everything, unless another process is at it. Raises StoreOwnedElsewhere, StoreUnavailable."""
        with self._db.alone("storage") as alone:
            if not alone:
                return None
            self.check_owner()
            self.deletions.finish_all()
            self.expire()
            self.make_room()
            swept = self._collector.collect()
            aborted = self._store.abort_stale_uploads(self._keeping.grace_s)
        if swept.deleted or aborted or swept.unreadable:
            logger.info("collected %d objects, %d bytes, %d dead uploads", swept.deleted, swept.deleted_bytes, aborted)
        for key in swept.unreadable:
            logger.warning("the committed manifest %s cannot be read; what its attempt wrote is kept", key)
        return swept

    def expire(self) -> int:
        """Let go of states that nobody used for as long as the operator keeps them; returns how many results."""
        if not self._keeping.states_s:
            return 0
        return self._let_go(None, self._clock() - self._keeping.states_s, lambda: True)

    def make_room(self) -> int:
        """Let go of the least used states of tenants that are over their budget; returns how many results."""
        with self._db.read() as session:
            tenants = StorageRepository(session).tenants()
        return sum(self._let_go(tenant, float("inf"), lambda t=tenant: self.short(t) is not None) for tenant in tenants)

    def short(self, tenant: str) -> OverBudget | None:
        """Why the tenant may not write more: the reason to pause its jobs for, or None."""
        with self._db.read() as session:
            held = sum(StorageRepository(session).bytes_by_stage(tenant).values())
        budget = self._keeping.budget_bytes
        if not budget or held <= budget:
            return None
        return OverBudget(
            f"the results of {tenant} hold {held} bytes, its budget is {budget}",
            remedy="delete what is not needed (POST /storage/deletions), or raise AERIE_TENANT_STORE_BYTES; jobs go on by themselves",
        )

    def _let_go(self, tenant: str | None, used_before: float, wanted: Callable[[], bool]) -> int:
        """Release idle states, the longest unused first, as long as it is `wanted`."""
        released, passed_over = 0, set[str]()
        while wanted():
            with self._db.write() as session:
                repository = StorageRepository(session)
                idle = repository.idle(STATES, tenant, used_before, ROUND + len(passed_over))
                row = next((r for r in idle if f"{r.tenant}/{r.key}" not in passed_over), None)
                if row is None:
                    return released
                if repository.release(row.tenant, row.key, self._clock()):
                    released += 1
                else:
                    passed_over.add(f"{row.tenant}/{row.key}")
        return released

    def check_owner(self) -> None:
        """Write this database's name into the store once. Raises StoreOwnedElsewhere if another one's is there."""
        with self._db.write() as session:
            own = StorageRepository(session).owner(secrets.token_hex(16))
        there = {stat.key.removeprefix(OWNERS) for stat in self._store.list(OWNERS)}
        if own not in there:
            self._store.put_bytes(OWNERS + own, b"")
        if others := sorted(there - {own}):
            raise StoreOwnedElsewhere(
                f"the store carries the name of another database ({', '.join(others)}), this one is {own}: "
                "nothing is collected, or its results would go",
                remedy=f"give this database a store or prefix of its own; if the other one is gone for good, delete {OWNERS}*",
            )

    def use(self, tenant: str = TENANT) -> StorageUse:
        """What the tenant's results hold."""
        with self._db.read() as session:
            by_stage = StorageRepository(session).bytes_by_stage(tenant)
        return StorageUse(
            bytes=sum(by_stage.values()), by_stage=by_stage, budget_bytes=self._keeping.budget_bytes or None,
            free_bytes=self._store.free_bytes(),
        )  # fmt: skip
