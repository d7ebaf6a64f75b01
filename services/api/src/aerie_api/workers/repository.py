"""All SQL about the fleet for people. Workers serve every tenant; what they are at is shown to its own tenant only."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from aerie_api.tables import Unit, Worker
from eagle3_core.errors import AerieError
from eagle3_core.jobs.states import UnitState


class WorkerMissing(AerieError):
    """There is no such worker."""

    code, status = "worker.missing", 404


class FleetRepository:
    """Workers and the running units of `tenant`, in one transaction."""

    def __init__(self, session: Session, tenant: str) -> None:
        self.session = session
        self.tenant = tenant

    def page(self, after: str | None, limit: int) -> list[Worker]:
        """Up to `limit` workers by name, after the worker `after`."""
        query = select(Worker).order_by(Worker.id).limit(limit)
        return list(self.session.scalars(query if after is None else query.where(Worker.id > after)))

    def locked(self, worker_id: str) -> Worker:
        """The worker `worker_id`, locked. Raises WorkerMissing."""
        worker = self.session.scalar(select(Worker).where(Worker.id == worker_id).with_for_update())
        if worker is None:
            raise WorkerMissing(f"no worker {worker_id!r}", remedy="GET /workers lists the workers")
        return worker

    def running(self, worker_ids: list[str]) -> dict[str, Unit]:
        """What each of the workers is at, whoever's it is."""
        query = select(Unit).where(Unit.state == UnitState.RUNNING, Unit.worker_id.in_(worker_ids))
        everybodys = query.execution_options(across_tenants=True)
        return {str(unit.worker_id): unit for unit in self.session.scalars(everybodys)}
