"""A full store pauses jobs and fails none; they go on by themselves once there is room.

Two things can be full: the store itself, reported by the worker that met it (`leases.retries`), and a tenant's budget, which
is checked when a stage is planned (`leases.planner`) and here. In both cases the job waits with the reason `store.full`, its
units use up no attempt, and finished work is kept. There is room again when what the job needs next fits the tenant's budget,
the store reports enough free space, and a trial object of the size of an upload's part can be written, since a quota of the
store shows in no number that it reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sqlalchemy.orm import Session

from aerie_api.db import Database
from aerie_api.jobs.repository import JobMissing, JobRepository
from aerie_api.leases.pausing import STORE_FULL, pause, resume_all
from aerie_api.leases.planner import Planner
from aerie_api.leases.repository import living
from aerie_api.storage.budget import Budget, Budgets
from aerie_api.storage.repository import StorageRepository
from aerie_api.storage.retention import Keeping, Retention
from aerie_api.tables import Job
from eagle3_core.objects.keys import HOUSE_PREFIX, new_nonce
from eagle3_core.objects.protocol import ObjectStore, StoreFull

TRIAL_BYTES = 16 << 20
"""What is written to see whether a store takes anything: one part of a large object."""


class Room:
    """Watches who may write, over one database and its store. `collect` takes away what was let go."""

    def __init__(
        self, db: Database, store: ObjectStore, planner: Planner, retention: Retention, keeping: Keeping, budgets: Budgets,
        collect: Callable[[], object], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._db, self._store, self._planner, self._budgets = db, store, planner, budgets
        self._retention, self._keeping, self._collect, self._clock = retention, keeping, collect, clock

    def watch(self) -> None:
        """One look, unless another process is at it. Raises StoreUnavailable: then those who wait go on waiting."""
        with self._db.alone("room") as alone:
            if not alone:
                return
            waiting = self._waiting()
            budgets = self._shrunk(waiting)
            for budget in budgets.values():
                if budget.excess() > 0:
                    self._pause_all(budget.tenant, budget.reason())

            def fits(job: Job) -> bool:
                return job.tenant not in budgets or budgets[job.tenant].excess(_needed_bytes(job)) <= 0

            if any(map(fits, waiting)) and (self.free() or (self._relieve() and self.free())):
                with self._db.write() as session:
                    for job in resume_all(session, STORE_FULL, self._clock(), fits):
                        self._planner.advance(session, job)

    def budgets(self) -> dict[str, Budget]:
        """How all tenants stand that something limits, by name."""
        with self._db.read() as session:
            return self._budgets.all(session)

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

    def _shrunk(self, waiting: Sequence[Job]) -> Mapping[str, Budget]:
        """How tenants stand when idle states are let go, as far as those who hold too much or wait for room need it."""
        budgets, released = self.budgets(), 0
        for budget in budgets.values():
            needs = [_needed_bytes(job) for job in waiting if job.tenant == budget.tenant]
            can_fit = [need for need in needs if need <= budget.limit_bytes]
            if (excess := budget.excess(min(can_fit, default=0))) > 0:
                released += self._retention.shrink(budget.tenant, excess)
        return self.budgets() if released else budgets

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

    def _waiting(self) -> list[Job]:
        """The jobs that wait for room and for nothing else."""
        with self._db.read() as session:
            paused = JobRepository.paused(session, locked=False)
            return [job for job in paused if (job.reason or {}).get("code") == STORE_FULL]

    def _relieve(self) -> bool:
        """Let go of idle states so that those who wait can go on; whether anything was there."""
        if not self._retention.relieve(self._keeping.room_bytes):
            return False
        self._collect()
        return True


def _needed_bytes(job: Job) -> int:
    """What a job that waits for room will write next, as far as its reason says so."""
    return (job.reason or {}).get("context", {}).get("needed_bytes", 0)
