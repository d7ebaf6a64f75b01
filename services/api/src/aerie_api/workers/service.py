"""What people do with workers: look, and let one back in that was set aside."""

from __future__ import annotations

from collections.abc import Callable

from aerie_api.auth import Caller
from aerie_api.db import Database
from aerie_api.leases.planner import stage_name
from aerie_api.leases.repository import WORKER_GONE_S
from aerie_api.leases.worker_health import readmit
from aerie_api.problems import Problem
from aerie_api.tables import Unit
from aerie_api.tables import Worker as WorkerRow
from aerie_api.tenants.repository import AuditRepository
from aerie_api.workers.repository import FleetRepository
from aerie_api.workers.schemas import Worker, WorkerList, WorkerState, WorkerUnit


class WorkerService:
    """The fleet."""

    def __init__(self, db: Database, clock: Callable[[], float]) -> None:
        self._db = db
        self._clock = clock

    def list(self, caller: Caller, after: str | None, limit: int) -> WorkerList:
        """Up to `limit` workers, by name. Of what others' units did on them only the operator learns."""
        with self._db.read() as session:
            fleet = FleetRepository(session, caller.tenant)
            rows = fleet.page(after, limit + 1)
            running = fleet.running([row.id for row in rows])
        data = [self._shown(row, running.get(row.id), caller) for row in rows[:limit]]
        return WorkerList(
            data=data, has_more=len(rows) > limit,
            first_id=data[0].id if data else None, last_id=data[-1].id if data else None,
        )  # fmt: skip

    def readmit(self, caller: Caller, worker_id: str) -> Worker:
        """Let a worker have work again. One that was not set aside stays as it is. Raises WorkerMissing."""
        with self._db.write() as session:
            fleet = FleetRepository(session, caller.tenant)
            worker = fleet.locked(worker_id)
            if worker.set_aside is not None:
                readmit(session, worker, self._clock())
                AuditRepository(session).note(caller, self._clock(), "worker.readmit", worker_id[:64])
            return self._shown(worker, fleet.running([worker_id]).get(worker_id), caller)

    def _shown(self, row: WorkerRow, unit: Unit | None, caller: Caller) -> Worker:
        return Worker(
            id=row.id, state=self._state(row, unit), queues=row.queues,  # type: ignore[arg-type]
            unit=_unit(unit) if unit is not None and unit.tenant == caller.tenant else None,
            first_seen=row.first_seen, last_seen=row.last_seen, set_aside_at=row.set_aside_at,
            reason=_reason(row, in_full="admin" in caller.scopes),
        )  # fmt: skip

    def _state(self, row: WorkerRow, unit: Unit | None) -> WorkerState:
        if row.set_aside is not None:
            return "set_aside"
        if unit is not None:
            return "busy"
        return "waiting" if row.last_seen >= self._clock() - WORKER_GONE_S else "silent"


def _reason(row: WorkerRow, *, in_full: bool) -> Problem | None:
    """Why a worker was set aside; not `in_full` without what its last unit said, which may be another tenant's."""
    if row.set_aside is None:
        return None
    reason = Problem.model_validate(row.set_aside)
    return reason if in_full else reason.model_copy(update={"detail": f"worker {row.id} failed several units in a row"})


def _unit(unit: Unit) -> WorkerUnit:
    return WorkerUnit(
        job=unit.job_id, stage=stage_name(unit.stage), unit=unit.index, attempt=unit.attempt,
        started_at=unit.started_at or 0.0, last_heartbeat=unit.last_heartbeat,
    )  # fmt: skip
