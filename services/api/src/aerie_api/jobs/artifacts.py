"""The finished drafter's files, as its manifest lists them.

A path from a client is only ever compared with the manifest's names, so nothing else can be reached. The bytes are
digested on the way out and the last piece is held back until the digest is right: a damaged file arrives short, never
whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from blake3 import blake3

from aerie_api.db import Database
from aerie_api.jobs.repository import JobRepository
from aerie_api.jobs.schemas import Artifact, ArtifactList
from aerie_api.leases.repository import UnitRepository
from eagle3_core.errors import AerieError
from eagle3_core.jobs.states import UnitState
from eagle3_core.jobs.wire import ManifestRef
from eagle3_core.objects.manifest import FileEntry, Manifest, read_manifest
from eagle3_core.objects.protocol import ObjectDamaged, ObjectStore

PIECE_BYTES = 1 << 20


class ArtifactMissing(AerieError):
    """The job has no such file."""

    code, status = "artifact.missing", 404


class ArtifactService:
    """Lists and reads what package made."""

    def __init__(self, db: Database, store: ObjectStore, presign_s: int = 0) -> None:
        """`presign_s`: how long the store's own download URLs are valid; 0 hands none out."""
        self._db = db
        self._store = store
        self._presign_s = presign_s

    def list(self, tenant: str, job_id: str, prefix: str) -> ArtifactList:
        """The files of a job's drafter; `prefix` is the path that they are served under."""
        manifest = self._manifest(tenant, job_id)
        files = manifest.files if manifest else []
        return ArtifactList(
            data=[
                Artifact(name=f.name, size=f.size, blake3=f.blake3, href=f"{prefix}/{f.name}", url=self._url(f))
                for f in files
            ]
        )

    def open(self, tenant: str, job_id: str, name: str) -> tuple[FileEntry, Iterator[bytes]]:
        """The file `name` and its bytes. Raises JobMissing, ArtifactMissing, ObjectMissing, ObjectDamaged."""
        manifest = self._manifest(tenant, job_id)
        entry = next((f for f in manifest.files if f.name == name), None) if manifest else None
        if entry is None:
            why = "lists no such file" if manifest else "does not exist yet: the job has not reached the end of package"
            raise ArtifactMissing(
                f"{name!r}: the drafter of {job_id} {why}", remedy=f"GET /jobs/{job_id}/artifacts lists what there is"
            )
        if (size := self._store.stat(entry.key).size) != entry.size:
            raise ObjectDamaged(
                f"{entry.name} has {size} bytes, its manifest says {entry.size}",
                remedy="retry the job to make it again",
            )
        return entry, self._pieces(entry)

    def _url(self, entry: FileEntry) -> str | None:
        """The store's own short-lived URL of a file that a committed manifest lists; no other key comes here."""
        if not self._presign_s:
            return None
        return self._store.download_url(entry.key, self._presign_s, entry.name.rpartition("/")[2])

    def _manifest(self, tenant: str, job_id: str) -> Manifest | None:
        with self._db.read() as session:
            job = JobRepository(session, tenant).get(job_id)
            units = UnitRepository(session, tenant).of_stage(job.id, "package")
            done = next((u for u in units if u.state == UnitState.SUCCEEDED), None)
            ref = ManifestRef.model_validate(done.manifest) if done is not None else None
        return read_manifest(self._store, ref) if ref is not None else None

    def _pieces(self, entry: FileEntry) -> Iterator[bytes]:
        hasher = blake3()
        for start in range(0, entry.size, PIECE_BYTES):
            piece = self._store.get_bytes(entry.key, start, PIECE_BYTES)
            hasher.update(piece)
            if start + PIECE_BYTES >= entry.size and hasher.hexdigest() != entry.blake3:
                raise ObjectDamaged(
                    f"{entry.name} hashes to {hasher.hexdigest()[:16]}, its manifest says {entry.blake3[:16]}",
                    remedy="delete the object and retry the job",
                )
            yield piece
