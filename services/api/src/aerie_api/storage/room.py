"""A full store pauses jobs and fails none; they go on by themselves once there is room.

Two things can be full: the store itself, reported by the worker that met it (`leases.retries`), and a tenant's budget, which
is checked here. In both cases the job waits with the reason `store.full`, its units use up no attempt, and finished work is
kept. There is room again when the tenant holds no more than its budget, the store reports enough free space, and a trial
object of the size of an upload's part can be written, since a quota of the store shows in no number that it reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sqlalchemy.orm import Session

from aerie_api.db import Database
from aerie_api.jobs.repository import JobMissing, JobRepository
from aerie_api.leases.pausing import STORE_FULL, pause, resume_all
from aerie_api.leases.planner import Planner
from aerie_api.leases.repository import living
from aerie_api.storage.repository import StorageRepository
from aerie_api.storage.retention import Keeping, Retention
from eagle3_core.objects.keys import HOUSE_PREFIX, new_nonce
from eagle3_core.objects.protocol import ObjectStore, StoreFull

TRIAL_BYTES = 16 << 20
"""What is written to see whether a store takes anything: one part of a large object."""


class Room:
    """Watches who may write, over one database and its store. `collect` takes away what was let go."""

    def __init__(
        self, db: Database, store: ObjectStore, planner: Planner, retention: Retention, keeping: Keeping,
        collect: Callable[[], object], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._db, self._store, self._planner = db, store, planner
        self._retention, self._keeping, self._collect, self._clock = retention, keeping, collect, clock

    def watch(self) -> None:
        """One look, unless another process is at it. Raises StoreUnavailable: then those who wait go on waiting."""
        with self._db.alone("room") as alone:
            if not alone:
                return
            over = self._over_after_shrinking()
            for tenant, held in over.items():
                self._pause_all(tenant, self.too_much(tenant, held))
            if self._waiting(over) and (self.free() or (self._relieve() and self.free())):
                with self._db.write() as session:
                    for job in resume_all(session, STORE_FULL, self._clock(), but=over):
                        self._planner.advance(session, job)

    def over(self) -> dict[str, int]:
        """What those hold who hold more than their budget, by tenant."""
        if not self._keeping.budget_bytes:
            return {}
        with self._db.read() as session:
            return StorageRepository(session).holding_more_than(self._keeping.budget_bytes)

    def too_much(self, tenant: str, held: int) -> StoreFull:
        """The reason why jobs of a tenant that holds `held` bytes wait."""
        return StoreFull(
            f"the results of {tenant} hold {held} bytes, its budget is {self._keeping.budget_bytes}",
            remedy="delete what is not needed (POST /storage/deletions), or raise AERIE_TENANT_STORE_BYTES; jobs go on by themselves",
            held_bytes=held, budget_bytes=self._keeping.budget_bytes,
        )  # fmt: skip

    def free(self) -> bool:
        """Whether the store has room for more. Raises StoreUnavailable."""
        free = self._store.free_bytes()
        if free is not None and free < self._keeping.room_bytes:
            return False
        key = f"{HOUSE_PREFIX}probe/{new_nonce()}-room"
        try:
            self._store.put_bytes(key, bytes(TRIAL_BYTES))
        except StoreFull:
            return False
        self._store.delete(key)
        return True

    def _over_after_shrinking(self) -> Mapping[str, int]:
        """Who is over budget still when its idle states are let go."""
        over = self.over()
        shrunk = [self._retention.shrink(t, held - self._keeping.budget_bytes) for t, held in over.items()]
        return self.over() if any(shrunk) else over

    def _pause_all(self, tenant: str, reason: StoreFull) -> None:
        with self._db.read() as session:
            job_ids = StorageRepository(session).moving_jobs(tenant)
        for job_id in job_ids:
            with self._db.write() as session:
                self._pause(session, tenant, job_id, reason)

    def _pause(self, session: Session, tenant: str, job_id: str, reason: StoreFull) -> None:
        try:
            job = JobRepository(session, tenant).locked(job_id)
        except JobMissing:  # removed meanwhile
            return
        if living(job):
            pause(session, job, reason.problem(), self._clock())

    def _waiting(self, over: Mapping[str, int]) -> bool:
        """Whether anybody waits for room in the store, and for nothing else."""
        with self._db.read() as session:
            return any(
                (job.reason or {}).get("code") == STORE_FULL and job.tenant not in over
                for job in JobRepository.paused(session, locked=False)
            )

    def _relieve(self) -> bool:
        """Let go of idle states so that those who wait can go on; whether anything was there."""
        if not self._retention.relieve(self._keeping.room_bytes):
            return False
        self._collect()
        return True
