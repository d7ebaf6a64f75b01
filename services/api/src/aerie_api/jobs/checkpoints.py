"""The checkpoints from which another attempt at a job's training would go on, as they lie in the store."""

from __future__ import annotations

from aerie_api.db import Database
from aerie_api.jobs.history import History
from aerie_api.jobs.repository import JobRepository
from aerie_api.jobs.schemas import Checkpoint, CheckpointList
from aerie_api.leases.repository import UnitRepository
from eagle3_core.objects.keys import Training, checkpoint_file
from eagle3_core.objects.protocol import ObjectStore


class CheckpointService:
    """Lists what a training saved."""

    def __init__(self, db: Database, store: ObjectStore) -> None:
        self._db = db
        self._store = store

    def list(self, tenant: str, job_id: str) -> CheckpointList:
        """The whole checkpoints of a job's training, newest first. Raises JobMissing."""
        with self._db.read() as session:
            job = JobRepository(session, tenant).get(job_id)
            keys = [unit.key for unit in UnitRepository(session, tenant).of_stage(job.id, "train")]
        found = [one for key in keys for one in self._whole(Training(tenant, key).prefix)]
        with self._db.read() as session:
            curves = History(session).at(tenant, job_id, "train", [one.step_number for one in found])
        for one in found:
            one.metrics = curves.get(one.step_number, {})
        return CheckpointList(data=found)

    def _whole(self, prefix: str) -> list[Checkpoint]:
        """Those whose marker was written, which is done last."""
        sizes, marked = dict[tuple[int, int], int](), dict[tuple[int, int], float]()
        for stat in self._store.list(prefix):
            if (file := checkpoint_file(stat.key)) is None:
                continue
            if file.marker:
                marked[file.step, file.fence] = stat.modified
            else:
                sizes[file.step, file.fence] = stat.size
        return [
            Checkpoint(step_number=step, fence=fence, created_at=at, size=sizes[step, fence], metrics={})
            for (step, fence), at in sorted(marked.items(), reverse=True)
            if (step, fence) in sizes
        ]
