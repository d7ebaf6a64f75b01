"""Deletion on request, with proof: what goes is written down, then it goes, then a list shows that it is gone.

Hidden states reveal their text, so whoever may have the text forgotten may have the states forgotten. Everything that
jobs made of a data set is found by the digest of its content, under whatever name it was read, together with results
that other jobs took over, and the halves that dead attempts left. A process that dies in the middle is followed by one
that finishes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from sqlalchemy.orm import Session

from aerie_api.auth import Caller
from aerie_api.db import Database
from aerie_api.storage.repository import StorageRepository
from aerie_api.storage.schemas import DeletedObject, DeletedObjects, DeletionProof, DeletionRequest
from aerie_api.tables import Deletion
from aerie_api.tenants.repository import AuditRepository
from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import STAGES
from eagle3_core.jobs.wire import ManifestRef
from eagle3_core.objects.collect import Collector, Swept
from eagle3_core.objects.keys import Attempt, Training, owner_of
from eagle3_core.objects.manifest import read_manifest
from eagle3_core.objects.protocol import BadKey, ObjectDamaged, ObjectMissing, ObjectStore

TEXT_STAGES = ("prepare", "generate", "extract")
"""Stages whose output holds the data's text: tokens, answers, hidden states."""


class StatesInUse(AerieError):
    """A living job reads what is to be deleted."""

    code, status = "storage.in_use", 409


class DataSetUnknown(AerieError):
    """No job of the tenant reads such a data set, so that a deletion would prove nothing."""

    code, status = "storage.dataset_unknown", 404


class DeletionMissing(AerieError):
    """There is no such deletion."""

    code, status = "storage.deletion_missing", 404


class Deletions:
    """Carries deletions out and keeps their proof."""

    def __init__(self, db: Database, store: ObjectStore, collector: Collector, clock: Callable[[], float]) -> None:
        self._db, self._store, self._collector, self._clock = db, store, collector, clock

    def delete(self, tenant: str, request: DeletionRequest, caller: Caller | None = None) -> DeletionProof:
        """Delete what `request` of `caller` names and prove it.

        Raises DataSetUnknown, StatesInUse, StoreUnavailable (then it is finished later).
        """
        with self._db.write() as session:
            deletion, manifests = self._let_go(session, request, tenant)
            if caller is not None:
                AuditRepository(session).note(caller, self._clock(), "storage.delete", deletion.id, **deletion.scope)
        digests = self._digests(manifests)
        with self._db.write() as session:
            StorageRepository(session).note_digests(tenant, deletion.id, digests)
        self._carry_out(tenant, deletion.id, deletion.prefixes, digests)
        return self.proof(tenant, deletion.id)

    def finish_all(self) -> None:
        """Finish what a process that died had begun."""
        with self._db.read() as session:
            left = StorageRepository(session).unfinished()
        for row in left:
            self._carry_out(row.tenant, row.id, row.prefixes, row.digests)

    def proof(self, tenant: str, deletion_id: str) -> DeletionProof:
        """How far a deletion is, and what it took. Raises DeletionMissing."""
        with self._db.read() as session:
            repository = StorageRepository(session)
            row = _found(repository.deletion(tenant, deletion_id), deletion_id)
            count, size = repository.deleted_totals(deletion_id)
        return DeletionProof(
            id=row.id, status="done" if row.finished_at is not None else "running", requested_at=row.requested_at,
            finished_at=row.finished_at, objects=count, bytes=size, remaining=row.remaining, **row.scope,
        )  # fmt: skip

    def objects(self, tenant: str, deletion_id: str, after: str, limit: int) -> DeletedObjects:
        """What a deletion took, page by page. Raises DeletionMissing."""
        with self._db.read() as session:
            repository = StorageRepository(session)
            _found(repository.deletion(tenant, deletion_id), deletion_id)
            rows = repository.deleted(deletion_id, after, limit + 1)
        data = [DeletedObject(key=row.key, size=row.size, blake3=row.blake3) for row in rows[:limit]]
        return DeletedObjects(data=data, has_more=len(rows) > limit)

    def _let_go(self, session: Session, request: DeletionRequest, tenant: str) -> tuple[Deletion, list[ManifestRef]]:
        repository, now = StorageRepository(session), self._clock()
        stages = tuple(STAGES) if request.everything else TEXT_STAGES
        job_ids = repository.readers(tenant, request.dataset)
        if request.dataset is not None and not job_ids:
            raise DataSetUnknown(
                f"no job here has read {request.dataset!r}: nothing was deleted, and nothing is proved",
                remedy="name it as a job did (`datasets[].uri` and `evaluation.prompts[].uri` in GET /jobs/ID), or by its content's "
                "BLAKE3 digest",
                pointer="/dataset",
            )
        units = repository.units_of(tenant, job_ids, stages)
        results = repository.results_of(tenant, job_ids, {unit.key for unit in units}, stages)
        keys = {unit.key for unit in units} | {row.key for row in results}
        living = repository.living(tenant, job_ids) | repository.living_users(tenant, keys)
        if living or not all(repository.release(tenant, key, now) for key in sorted(keys)):
            raise StatesInUse(
                f"living jobs read them: {', '.join(sorted(living)) or 'one that was just posted'}",
                remedy="cancel those jobs or wait for their end, then ask again",
            )
        held = [row.manifest for row in results] + [unit.manifest for unit in units if unit.manifest is not None]
        manifests = [ManifestRef.model_validate(manifest) for manifest in held]
        places = {f"{tenant}/{stage}/{job_id}/" for stage in stages for job_id in job_ids}
        owners = {owner_of(ref.key) for ref in manifests}
        places |= {owner.prefix for owner in owners if isinstance(owner, Attempt) and owner.job_id not in job_ids}
        if request.everything:
            places |= {Training(tenant, unit.key).prefix for unit in units if unit.stage == "train"}
        deletion = Deletion(
            id=f"del_{secrets.token_hex(12)}", tenant=tenant, scope=request.model_dump(mode="json"),
            prefixes=sorted(places), digests={}, requested_at=now, finished_at=None, remaining=None,
        )  # fmt: skip
        session.add(deletion)
        return deletion, manifests

    def _digests(self, manifests: list[ManifestRef]) -> dict[str, str]:
        found: dict[str, str] = {}
        for ref in manifests:
            found[ref.key] = ref.blake3
            try:
                found |= {entry.key: entry.blake3 for entry in read_manifest(self._store, ref).files}
            except (ObjectMissing, ObjectDamaged, BadKey):
                continue  # the keys themselves still hold 16 digits of each digest
        return found

    def _carry_out(self, tenant: str, deletion_id: str, prefixes: list[str], digests: dict[str, str]) -> None:
        remaining = 0
        for prefix in prefixes:
            for batch in self._collector.garbage(prefix, Swept(), None):
                with self._db.write() as session:
                    StorageRepository(session).note_deleted(
                        deletion_id, [(stat.key, stat.size, digests.get(stat.key)) for stat in batch]
                    )
                for stat in batch:
                    self._store.delete(stat.key)
            remaining += sum(1 for _ in self._store.list(prefix))
        with self._db.write() as session:
            StorageRepository(session).note_finished(tenant, deletion_id, self._clock(), remaining)


def _found(row: Deletion | None, deletion_id: str) -> Deletion:
    if row is None:
        raise DeletionMissing(f"no deletion {deletion_id!r}", remedy="POST /storage/deletions asks for one")
    return row
