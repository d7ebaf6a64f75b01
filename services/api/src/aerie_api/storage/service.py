"""Keeps the store in order: expired states are released, unreferenced objects deleted, tenants that are short of room noted.

Of several API processes one does it at a time; two at once would do no harm. Nothing is deleted where the store carries
another database's name: a new, empty database would take everything in it for garbage.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection

from aerie_api.db import Database
from aerie_api.leases.planner import Planner
from aerie_api.storage.budget import Budgets
from aerie_api.storage.deletions import Deletions
from aerie_api.storage.repository import StorageRepository
from aerie_api.storage.retention import Keeping, Retention
from aerie_api.storage.room import Room
from aerie_api.storage.schemas import StorageUse
from eagle3_core.errors import AerieError
from eagle3_core.jobs.wire import ManifestRef
from eagle3_core.objects.collect import Collector, Holdings, Swept
from eagle3_core.objects.keys import HOUSE_PREFIX, Attempt, Owner
from eagle3_core.objects.manifest import read_manifest
from eagle3_core.objects.protocol import BadKey, ObjectDamaged, ObjectMissing, ObjectStore

logger = logging.getLogger(__name__)
OWNERS = f"{HOUSE_PREFIX}owner/"
MEASURED = 100
"""Results that a round counts the bytes of, where that was never done."""


class StoreOwnedElsewhere(AerieError):
    """The store belongs to another database."""

    code, status = "storage.owner", 409


class StorageService:
    """The store's housekeeping, over one database."""

    def __init__(
        self, db: Database, store: ObjectStore, planner: Planner, keeping: Keeping, budgets: Budgets,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._db, self._store, self._keeping, self._budgets = db, store, keeping, budgets
        self._collector = Collector(store, self, grace_s=keeping.grace_s, checkpoint_grace_s=keeping.checkpoint_grace_s)
        self.retention = Retention(db, keeping, clock)
        self.room = Room(db, store, planner, self.retention, keeping, budgets, self.collect, clock)
        self.deletions = Deletions(db, store, self._collector, clock)

    def about(self, owners: Collection[Owner]) -> Holdings:
        """What the database holds of `owners` now (`objects.collect.Truth`): one look at one state of it."""
        jobs = {owner.job_id for owner in owners if isinstance(owner, Attempt)}
        with self._db.read() as session:
            repository = StorageRepository(session)
            return Holdings(repository.committed(jobs), frozenset(repository.in_flight(owners)))

    def keep_order(self) -> Swept | None:
        """One round of everything; None where another process is at it. Raises StoreOwnedElsewhere, StoreUnavailable."""
        self.measure()
        self.retention.expire()
        self.room.watch()
        return self.collect()

    def collect(self) -> Swept | None:
        """Finish deletions and take garbage away; None where another process is at it. Raises as `keep_order`."""
        with self._db.alone("storage") as alone:
            if not alone:
                return None
            self.check_owner()
            self.deletions.finish_all()
            swept = self._collector.collect()
            aborted = self._store.abort_stale_uploads(self._keeping.grace_s)
        if swept.deleted or aborted or swept.unreadable:
            logger.info("collected %d objects, %d bytes, %d dead uploads", swept.deleted, swept.deleted_bytes, aborted)
        for key in swept.unreadable:
            logger.warning("the committed manifest %s cannot be read; what its attempt wrote is kept", key)
        return swept

    def measure(self) -> None:
        """Count the bytes of results that were made before they were counted."""
        with self._db.read() as session:
            rows = StorageRepository(session).unmeasured(MEASURED)
        for row in rows:
            try:
                size = sum(
                    entry.size for entry in read_manifest(self._store, ManifestRef.model_validate(row.manifest)).files
                )
            except (ObjectMissing, ObjectDamaged, BadKey):
                size = 0  # nobody can take it over: the planner forgets such a result when it comes to it
            with self._db.write() as session:
                StorageRepository(session).measured(row.tenant, row.key, size)

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

    def use(self, tenant: str) -> StorageUse:
        """What the tenant's results hold."""
        with self._db.read() as session:
            by_stage = StorageRepository(session).bytes_by_stage(tenant)
            budget = self._budgets.of(session, tenant)
        return StorageUse(
            bytes=sum(by_stage.values()), by_stage=by_stage, budget_bytes=None if budget is None else budget.limit_bytes,
            free_bytes=self._store.free_bytes(),
        )  # fmt: skip
