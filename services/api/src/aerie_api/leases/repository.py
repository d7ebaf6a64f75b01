"""All SQL about units, attempts, the result cache and workers.

The writes that decide who owns a unit are single guarded UPDATEs: `take` and `hold` say in their WHERE what must
still be true, and zero changed rows means that it was not. Workers serve every tenant, so finding work is not
filtered by one; what people read and the cache are.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import CursorResult, Select, Text, and_, delete, func, select, update
from sqlalchemy import cast as sql_cast
from sqlalchemy.orm import Session, defer

from aerie_api.db import upsert
from aerie_api.jobs.waiting import Fleet
from aerie_api.leases.spells import Spell
from aerie_api.metrics import ATTEMPTS, once_committed
from aerie_api.tables import Attempt, CommitRow, Job, Unit, Worker
from aerie_api.tenants.repository import UsageRepository
from eagle3_core.jobs.states import UnitState
from eagle3_core.jobs.wire import ClaimRequest

Chosen = TypeVar("Chosen")
WORKER_GONE_S = 150.0
"""A worker that has asked for nothing for so long is not counted on; a long poll takes up to 60 s."""


def token_hash(token: str) -> str:
    """How a token is stored. Tokens are 256 random bits, so a plain hash cannot be searched."""
    return hashlib.sha256(token.encode()).hexdigest()


class UnitRepository:
    """Units and their attempts, in one transaction: those of `tenant`, or, for workers and the house itself, of all."""

    def __init__(self, session: Session, tenant: str | None = None) -> None:
        self.session = session
        self.tenant = tenant

    def _units(self, query: Select[Chosen]) -> Select[Chosen]:
        return query if self.tenant is None else query.where(Unit.tenant == self.tenant)

    def get(self, unit_id: str) -> Unit | None:
        """The unit `unit_id`."""
        return self.session.get(Unit, unit_id)

    def place_of(self, unit_id: str) -> tuple[str, str] | None:
        """Tenant and job of `unit_id`, which never change: what must be known to lock the job."""
        found = self.session.execute(select(Unit.tenant, Unit.job_id).where(Unit.id == unit_id)).one_or_none()
        return None if found is None else (found[0], found[1])

    def of_stage(self, job_id: str, stage: str) -> list[Unit]:
        """The units of a job's stage, in order."""
        query = self._units(select(Unit)).where(Unit.job_id == job_id, Unit.stage == stage).order_by(Unit.index)
        return list(self.session.scalars(query))

    def of_job(self, job_id: str, states: Collection[UnitState]) -> list[Unit]:
        """The units of a job in one of `states`, in order."""
        query = self._units(select(Unit)).where(Unit.job_id == job_id, Unit.state.in_(states))
        return list(self.session.scalars(query.order_by(Unit.position, Unit.index)))

    def figures_of(self, job_ids: Sequence[str]) -> list[Unit]:
        """The units of several jobs, in order, without their results and manifests (which may be large)."""
        query = self._units(select(Unit)).options(defer(Unit.result), defer(Unit.manifest))
        query = query.where(Unit.job_id.in_(job_ids))
        return list(self.session.scalars(query.order_by(Unit.job_number, Unit.position, Unit.index)))

    def next_of(self, job_id: str, queues: Collection[str], now: float) -> Unit | None:
        """The job's unit to work on next, in order of stages and slices."""
        claimable = and_(Unit.state == UnitState.QUEUED, Unit.queue.in_(queues), Unit.not_before <= now)
        query = self._units(select(Unit)).where(Unit.job_id == job_id, claimable)
        return self.session.scalar(query.order_by(Unit.position, Unit.index).limit(1))

    def next_due(self, queues: Collection[str], now: float) -> float | None:
        """When the next waiting unit may be claimed."""
        query = select(func.min(Unit.not_before)).where(
            Unit.state == UnitState.QUEUED, Unit.queue.in_(queues), Unit.not_before > now
        )
        return self.session.scalar(query)

    def take(self, unit: Unit, request: ClaimRequest, token: str, now: float, lease_s: float) -> bool:
        """Give `unit` to a worker: fence and attempt grow, a new token counts. False if it is no longer free."""
        changed = self._update(
            update(Unit)
            .where(Unit.id == unit.id, Unit.fence == unit.fence, Unit.state == UnitState.QUEUED, Unit.not_before <= now)
            .values(
                state=UnitState.RUNNING, fence=Unit.fence + 1, attempt=Unit.attempt + 1, progress=None,
                worker_id=request.worker_id, incarnation=request.incarnation,
                lease_expires_at=now + lease_s, last_heartbeat=now, started_at=now, moved_at=now,
            )
        )  # fmt: skip
        if not changed:
            return False
        self.session.refresh(unit)
        self.session.add(
            Attempt(
                unit_id=unit.id, fence=unit.fence, tenant=unit.tenant, attempt=unit.attempt, token_hash=token_hash(token),
                worker_id=request.worker_id, incarnation=request.incarnation, gpus=request.gpus, started_at=now,
            )
        )  # fmt: skip
        return True

    def attempt_of(self, unit_id: str, token: str) -> Attempt | None:
        """The attempt at a unit that `token` belongs to, whether it still counts or not."""
        given = token_hash(token)
        found: Attempt | None = None
        for attempt in self.session.scalars(select(Attempt).where(Attempt.unit_id == unit_id)):
            if hmac.compare_digest(attempt.token_hash, given):
                found = attempt
        return found

    def hold(self, unit: Unit, fence: int, now: float, lease_s: float) -> bool:
        """Extend the lease of whoever holds `fence`. False if that attempt no longer holds the unit."""
        held = (
            update(Unit)
            .where(Unit.id == unit.id, Unit.fence == fence, Unit.state == UnitState.RUNNING)
            .values(lease_expires_at=now + lease_s, last_heartbeat=now)
            .returning(Unit)
        )
        fresh = {"populate_existing": True, "synchronize_session": False}
        return self.session.scalars(held, execution_options=fresh).one_or_none() is not None

    def end_attempt(
        self, unit: Unit, now: float, cause: str, problem: dict[str, Any] | None, blames_worker: bool
    ) -> None:
        """Close the unit's newest attempt."""
        attempt = self.session.get_one(Attempt, (unit.id, unit.fence))
        attempt.ended_at, attempt.cause, attempt.problem = now, cause, problem
        attempt.blames_worker = blames_worker
        UsageRepository(self.session, unit.tenant).add(now, max(0.0, now - attempt.started_at), attempt.gpus)
        once_committed(self.session, ATTEMPTS.labels(unit.stage, cause).inc)

    def expired(self, now: float) -> list[Unit]:
        """Running units whose lease is over."""
        query = select(Unit).where(Unit.state == UnitState.RUNNING, Unit.lease_expires_at < now)
        return list(self.session.scalars(query.order_by(Unit.job_number, Unit.position, Unit.index)))

    def not_moved_since(self, before: float) -> list[Unit]:
        """Running units that have not got on since `before`."""
        query = select(Unit).where(Unit.state == UnitState.RUNNING, Unit.moved_at < before)
        return list(self.session.scalars(query.order_by(Unit.job_number, Unit.position, Unit.index)))

    def of_earlier_incarnation(self, worker_id: str, incarnation: str) -> list[Unit]:
        """Running units that this worker held before it was started again."""
        mine = and_(Unit.state == UnitState.RUNNING, Unit.worker_id == worker_id, Unit.incarnation != incarnation)
        return list(self.session.scalars(select(Unit).where(mine)))

    def held_by(self, worker_id: str, incarnation: str) -> list[tuple[str, int, Job]]:
        """The units that a start of a worker holds, by id, with its attempt's fence and their jobs."""
        mine = and_(Unit.state == UnitState.RUNNING, Unit.worker_id == worker_id, Unit.incarnation == incarnation)
        query = select(Unit.id, Unit.fence, Job).join(Job, Job.id == Unit.job_id).where(mine)
        return [(unit_id, fence, job) for unit_id, fence, job in self.session.execute(query)]

    def extend_all(self, now: float, until: float) -> None:
        """Let every running lease last at least until `until`, but those that somebody is just writing to.

        What stood still before `now` is not counted.
        """
        short = select(Unit.id).where(Unit.state == UnitState.RUNNING, Unit.lease_expires_at < until)
        ids = list(self.session.scalars(short.with_for_update(skip_locked=True)))
        self._update(update(Unit).where(Unit.id.in_(ids)).values(lease_expires_at=until, moved_at=now))

    def attempts(self, job_id: str) -> list[tuple[Unit, Attempt]]:
        """Every attempt at a job's units, in order of their start."""
        query = select(Unit, Attempt).join(Attempt, Attempt.unit_id == Unit.id).where(Unit.job_id == job_id)
        if self.tenant is not None:
            query = query.where(Unit.tenant == self.tenant, Attempt.tenant == self.tenant)
        return [
            (unit, attempt) for unit, attempt in self.session.execute(query.order_by(Attempt.started_at, Attempt.fence))
        ]

    def spells(self, job_ids: Collection[str]) -> dict[tuple[str, str], list[Spell]]:
        """When attempts at the units of several jobs ran, by job and stage."""
        query = select(Unit.job_id, Unit.stage, Attempt.started_at, Attempt.ended_at)
        query = query.join(Attempt, Attempt.unit_id == Unit.id).where(Unit.job_id.in_(job_ids))
        if self.tenant is not None:
            query = query.where(Unit.tenant == self.tenant, Attempt.tenant == self.tenant)
        found: dict[tuple[str, str], list[Spell]] = defaultdict(list)
        for job_id, stage, began, ended in self.session.execute(query):
            found[job_id, stage].append((began, ended))
        return found

    def remove(self, units: Sequence[Unit]) -> None:
        """Forget units, so that their stage is planned again."""
        for unit in units:
            self.session.delete(unit)
        self.session.flush()

    def _update(self, statement: Any) -> bool:
        result = cast("CursorResult[Any]", self.session.execute(statement.execution_options(synchronize_session=False)))
        return result.rowcount > 0


class CommitRepository:
    """The result cache of `tenant`."""

    def __init__(self, session: Session, tenant: str) -> None:
        self.session = session
        self.tenant = tenant

    def find(self, keys: Collection[str]) -> dict[str, CommitRow]:
        """What is known under `keys`."""
        query = select(CommitRow).where(CommitRow.tenant == self.tenant, CommitRow.key.in_(keys))
        return {row.key: row for row in self.session.scalars(query)}

    def use(self, keys: Collection[str], now: float) -> set[str]:
        """Note that results are taken over now; those of `keys` that are still there. They cannot be let go meanwhile."""
        query = select(CommitRow).where(CommitRow.tenant == self.tenant, CommitRow.key.in_(keys))
        rows = list(self.session.scalars(query.order_by(CommitRow.key).with_for_update()))
        for row in rows:
            row.last_used_at = now
        return {row.key for row in rows}

    def add(self, row: CommitRow) -> None:
        """Store a result; the first under a key wins, so nothing that was built on one ever changes."""
        values = {column.key: getattr(row, column.key) for column in CommitRow.__table__.columns}
        self.session.execute(upsert(self.session, CommitRow).values(**values).on_conflict_do_nothing())

    def forget(self, key: str) -> None:
        """Drop a result whose objects are gone."""
        self.session.execute(delete(CommitRow).where(CommitRow.tenant == self.tenant, CommitRow.key == key))


class WorkerRepository:
    """The workers that asked for work."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def seen(self, request: ClaimRequest, now: float) -> None:
        """Note that a worker asked."""
        said = {"incarnation": request.incarnation, "queues": sorted(set(request.queues)), "last_seen": now}
        statement = upsert(self.session, Worker).values(id=request.worker_id, first_seen=now, **said)
        self.session.execute(statement.on_conflict_do_update(index_elements=["id"], set_=said))

    def refusal(self, worker_id: str) -> dict[str, Any] | None:
        """The problem for which a worker was set aside, if it was."""
        return self.session.scalar(select(Worker.set_aside).where(Worker.id == worker_id))

    def still_there(self, worker_id: str, now: float) -> None:
        """Note that a worker reported."""
        self.session.execute(update(Worker).where(Worker.id == worker_id).values(last_seen=now))

    def fleet(self, since: float) -> Fleet:
        """The workers seen after `since`, by what they serve."""
        serving, aside = set[str](), defaultdict[str, list[str]](list)
        seen, is_aside = Worker.last_seen >= since, Worker.set_aside.is_not(None)
        # A fleet of hundreds serves few sets of queues: each is read once.
        for queues in self.session.scalars(select(sql_cast(Worker.queues, Text)).where(seen, ~is_aside).distinct()):
            serving.update(json.loads(queues))
        for worker, queues in self.session.execute(select(Worker.id, Worker.queues).where(seen, is_aside)):
            for queue in queues:
                aside[queue].append(worker)
        return Fleet(frozenset(serving), dict(aside))


def living(job: Job) -> bool:
    """Whether units of `job` may run."""
    return job.status in ("queued", "running")


def wanted(job: Job) -> bool:
    """Whether what units of `job` make is of use: also while it is paused."""
    return living(job) or job.status == "paused"
