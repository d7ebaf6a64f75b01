"""All SQL about what the object store holds for whom.

A result is held by its row in the cache, and by every unit that points to its manifest and was not let go. Letting go
locks the row of the cache first and looks at the units after, so a job that takes the result over at the same moment
either keeps it or does not get it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from typing import Any, TypeVar

from sqlalchemy import BigInteger, Select, and_, delete, exists, func, literal, or_, select, update
from sqlalchemy.orm import Session

from aerie_api.db import upsert
from aerie_api.tables import CommitRow, DeletedObject, Deletion, Job, StoreOwner, Tenant, Unit
from eagle3_core.data.sources import same_source
from eagle3_core.jobs.states import ENDED, UnitState
from eagle3_core.jobs.wire import ManifestRef
from eagle3_core.objects.keys import Attempt, Owner, Training

Found = TypeVar("Found")
ACROSS_TENANTS: dict[str, Any] = {"across_tenants": True}
"""Said of a query that serves the house, and so every tenant."""
_OVER = (UnitState.SUCCEEDED, UnitState.FAILED, UnitState.CANCELLED)


class StorageRepository:
    """What is held, in one transaction. Methods that serve people take the tenant."""

    def __init__(self, session: Session) -> None:
        self.session = session

    # -- the truth that the collector asks for

    def committed(self, job_ids: Collection[str]) -> list[ManifestRef]:
        """The manifests that are held and were written by attempts of `job_ids`."""
        cached = select(CommitRow.manifest).where(CommitRow.job_id.in_(job_ids))
        of_units = select(Unit.manifest).where(
            or_(Unit.job_id.in_(job_ids), Unit.reused_from.in_(job_ids)),
            Unit.released_at.is_(None),
            Unit.state == UnitState.SUCCEEDED,
        )
        found = [*self._of_all(cached), *self._of_all(of_units)]
        return [ManifestRef.model_validate(manifest) for manifest in found if manifest is not None]

    def held(self) -> list[ManifestRef]:
        """Every manifest that a result or a unit points to, of whatever tenant, once."""
        cached = select(CommitRow.manifest)
        of_units = select(Unit.manifest).where(Unit.released_at.is_(None), Unit.state == UnitState.SUCCEEDED)
        found = [*self._of_all(cached), *self._of_all(of_units)]
        return list({ref.key: ref for m in found if m is not None for ref in [ManifestRef.model_validate(m)]}.values())

    def in_flight(self, owners: Collection[Owner]) -> set[Owner]:
        """Those of `owners` that may still commit, or go on from their checkpoints."""
        job_ids = {owner.job_id for owner in owners if isinstance(owner, Attempt)}
        running = select(Unit).where(Unit.job_id.in_(job_ids), Unit.state == UnitState.RUNNING)
        found: set[Owner] = set()
        for unit in self._of_all(running):
            stages = (unit.stage, "extract") if unit.stage == "generate" else (unit.stage,)
            found |= {Attempt(unit.tenant, stage, unit.job_id, unit.index, unit.fence) for stage in stages}
        keys = {owner.unit_key for owner in owners if isinstance(owner, Training)}
        living = select(Unit.tenant, Unit.key).where(
            Unit.key.in_(keys), Unit.stage == "train", Unit.state.not_in(_OVER)
        )
        everybody = self.session.execute(living, execution_options=ACROSS_TENANTS)
        return found | {Training(tenant, key) for tenant, key in everybody}

    def _of_all(self, query: Select[Found]) -> list[Found]:
        """The truth knows every tenant, also while it is asked for one."""
        return list(self.session.scalars(query, execution_options=ACROSS_TENANTS))

    # -- letting go

    def idle(
        self, stages: Collection[str], tenant: str | None, used_before: float, made_before: float, limit: int
    ) -> list[CommitRow]:
        """Results of `stages` that nobody has used since `used_before`, the longest unused first, unlocked."""
        used = func.coalesce(CommitRow.last_used_at, CommitRow.created_at)
        query = select(CommitRow).where(CommitRow.stage.in_(stages))
        query = query if used_before == inf else query.where(used < used_before)
        query = query if made_before == inf else query.where(CommitRow.created_at < made_before)
        query = query if tenant is None else query.where(CommitRow.tenant == tenant)
        return self._of_all(query.order_by(used, CommitRow.key).limit(limit))

    def release(self, tenant: str, key: str, now: float) -> bool:
        """Let go of a result and of the ended units that point to it; False while a living job has it."""
        mine = and_(CommitRow.tenant == tenant, CommitRow.key == key)
        self.session.execute(select(CommitRow.key).where(mine).with_for_update())
        users = and_(Unit.tenant == tenant, Unit.key == key)
        job_ids = set(self.session.scalars(select(Unit.job_id).where(users)))
        theirs = select(Job).where(Job.tenant == tenant, Job.id.in_(job_ids)).order_by(Job.id)
        locked = theirs.with_for_update(skip_locked=True)
        jobs = list(self.session.scalars(locked))
        if len(jobs) < len(job_ids) or any(job.status not in ENDED for job in jobs):
            return False
        self.session.execute(delete(CommitRow).where(mine))
        self.session.execute(
            update(Unit).where(users, Unit.released_at.is_(None)).values(released_at=now),
            execution_options={"synchronize_session": False},
        )
        return True

    # -- figures

    def bytes_by_stage(self, tenant: str) -> dict[str, int]:
        """Bytes that results of `tenant` hold, by stage."""
        query = select(CommitRow.stage, func.coalesce(func.sum(CommitRow.bytes), 0)).where(CommitRow.tenant == tenant)
        return {stage: int(size or 0) for stage, size in self.session.execute(query.group_by(CommitRow.stage))}

    def budgets(self, everybodys_bytes: int | None, tenant: str | None = None) -> list[tuple[str, int, int]]:
        """Tenant, bytes held, bytes allowed: of those that something limits, or of one of them."""
        held = select(func.coalesce(func.sum(CommitRow.bytes), 0)).where(CommitRow.tenant == Tenant.id)
        limit = func.coalesce(Tenant.store_bytes, literal(everybodys_bytes, BigInteger))
        query = select(Tenant.id, held.correlate(Tenant).scalar_subquery(), limit).where(limit.is_not(None))
        query = query if tenant is None else query.where(Tenant.id == tenant)
        return [(name, int(size), int(most)) for name, size, most in self.session.execute(query.order_by(Tenant.id))]

    def unmeasured(self, limit: int) -> list[CommitRow]:
        """Results whose bytes nobody has counted: those that are older than the count."""
        return self._of_all(select(CommitRow).where(CommitRow.bytes.is_(None)).limit(limit))

    def measured(self, tenant: str, key: str, size: int) -> None:
        """Note what a result holds."""
        mine = and_(CommitRow.tenant == tenant, CommitRow.key == key, CommitRow.bytes.is_(None))
        self.session.execute(
            update(CommitRow).where(mine).values(bytes=size), execution_options={"synchronize_session": False}
        )

    # -- jobs that are to wait for room

    def moving_jobs(self, tenant: str) -> list[str]:
        """Ids of the tenant's jobs that are queued or running, oldest first."""
        query = select(Job.id).where(Job.tenant == tenant, Job.status.in_(("queued", "running")))
        return list(self.session.scalars(query.order_by(Job.number)))

    # -- deletions

    def readers(self, tenant: str, dataset: str | None) -> set[str]:
        """Ids of the tenant's jobs that read `dataset` (its path or URI in any form, or the digest of its content), or of all.

        Jobs that were removed count too, as long as results of theirs are held.
        """
        jobs = select(Job.id, Job.sources).where(Job.tenant == tenant)
        removed = select(CommitRow.job_id, CommitRow.sources).where(
            CommitRow.tenant == tenant,
            ~exists().where(and_(Job.tenant == tenant, Job.id == CommitRow.job_id)),
        )
        read = [
            (job_id, {uri: digest for uri, digest in (sources or {}).items() if uri != "verifier"})
            for query in (jobs, removed)
            for job_id, sources in self.session.execute(query)
        ]
        if dataset is None:
            return {job_id for job_id, _ in read}
        digests = {
            digest
            for _, sources in read
            for uri, digest in sources.items()
            if dataset == digest or same_source(uri, dataset)
        }
        return {job_id for job_id, sources in read if digests & set(sources.values())}

    def living(self, tenant: str, job_ids: Collection[str]) -> set[str]:
        """Those of `job_ids` that have not ended."""
        query = select(Job.id).where(Job.tenant == tenant, Job.id.in_(job_ids), Job.status.not_in(ENDED))
        return set(self.session.scalars(query))

    def units_of(self, tenant: str, job_ids: Collection[str], stages: Collection[str]) -> list[Unit]:
        """Units of `stages` of some jobs."""
        query = select(Unit).where(Unit.tenant == tenant, Unit.job_id.in_(job_ids), Unit.stage.in_(stages))
        return list(self.session.scalars(query.order_by(Unit.job_number, Unit.position, Unit.index)))

    def results_of(
        self, tenant: str, job_ids: Collection[str], keys: Collection[str], stages: Collection[str]
    ) -> list[CommitRow]:
        """Results that some jobs made, or took over under `keys`."""
        theirs = or_(CommitRow.job_id.in_(job_ids), CommitRow.key.in_(keys))
        query = select(CommitRow).where(CommitRow.tenant == tenant, CommitRow.stage.in_(stages), theirs)
        return list(self.session.scalars(query.order_by(CommitRow.key)))

    def living_users(self, tenant: str, keys: Collection[str]) -> set[str]:
        """Ids of living jobs that hold one of `keys`."""
        query = select(Unit.job_id).join(Job, Job.id == Unit.job_id)
        return set(
            self.session.scalars(
                query.where(Unit.tenant == tenant, Job.tenant == tenant, Unit.key.in_(keys), Job.status.not_in(ENDED))
            )
        )

    def deletion(self, tenant: str, deletion_id: str) -> Deletion | None:
        """A deletion of `tenant`."""
        return self.session.scalar(select(Deletion).where(Deletion.tenant == tenant, Deletion.id == deletion_id))

    def unfinished(self) -> list[Deletion]:
        """Deletions that a process did not live to finish."""
        return self._of_all(select(Deletion).where(Deletion.finished_at.is_(None)).order_by(Deletion.id))

    def note_digests(self, tenant: str, deletion_id: str, digests: dict[str, str]) -> None:
        """Write down what the manifests of a deletion said."""
        self._note(tenant, deletion_id, digests=digests)

    def note_finished(self, tenant: str, deletion_id: str, now: float, remaining: int) -> None:
        """Write down that a deletion is carried out, and what a list still showed."""
        self._note(tenant, deletion_id, finished_at=now, remaining=remaining)

    def _note(self, tenant: str, deletion_id: str, **values: Any) -> None:
        mine = and_(Deletion.tenant == tenant, Deletion.id == deletion_id)
        self.session.execute(
            update(Deletion).where(mine).values(**values), execution_options={"synchronize_session": False}
        )

    def note_deleted(self, deletion_id: str, objects: Sequence[tuple[str, int, str | None]]) -> None:
        """Write down what is about to go: key, size, digest."""
        if objects:
            rows = [{"deletion_id": deletion_id, "key": k, "size": s, "blake3": d} for k, s, d in objects]
            self.session.execute(upsert(self.session, DeletedObject).values(rows).on_conflict_do_nothing())

    def deleted(self, deletion_id: str, after: str, limit: int) -> list[DeletedObject]:
        """What a deletion took, in key order."""
        query = select(DeletedObject).where(DeletedObject.deletion_id == deletion_id, DeletedObject.key > after)
        return list(self.session.scalars(query.order_by(DeletedObject.key).limit(limit)))

    def deleted_totals(self, deletion_id: str) -> tuple[int, int]:
        """Objects and bytes that a deletion took."""
        query = select(func.count(), func.coalesce(func.sum(DeletedObject.size), 0))
        count, size = self.session.execute(query.where(DeletedObject.deletion_id == deletion_id)).one()
        return int(count), int(size)

    # -- the owner

    def owner(self, candidate: str) -> str:
        """The name under which this database owns its store: `candidate` if it has none yet."""
        row = {"place": "store", "id": candidate}
        self.session.execute(upsert(self.session, StoreOwner).values(**row).on_conflict_do_nothing())
        return self.session.scalars(select(StoreOwner.id).where(StoreOwner.place == "store")).one()
