"""Manifests: the write-once lists that make objects count.

A unit writes its files under keys that carry its fence, a nonce and their content's hash, then one manifest. Nobody reads a
file that no committed manifest lists, and whoever reads one checks its size and BLAKE3. So a zombie's half-written
objects are garbage, never data. `content` digests what was made, not where or when: downstream keys build on it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt

from eagle3_core import patterns
from eagle3_core.digests import digest_bytes, digest_file, digest_json
from eagle3_core.jobs.graph import StageName
from eagle3_core.jobs.wire import ManifestRef
from eagle3_core.objects.keys import Attempt, new_nonce
from eagle3_core.objects.protocol import BadKey, ObjectDamaged, ObjectStore, checked_key
from eagle3_core.strict_json import parse_model

SCHEMA_VERSION = 1
READS = 3
"""How often damaged bytes are read before the object itself is called damaged."""


def _key(value: str) -> str:
    try:
        return checked_key(value)
    except BadKey as error:
        raise ValueError(error.detail) from None


Key = Annotated[str, AfterValidator(_key)]
"""A path that stays inside the place it starts from: files are written and read under what a manifest says."""


class FileEntry(BaseModel):
    """One file of a unit's output."""

    model_config = ConfigDict(extra="forbid")

    name: Key
    """Name within the output, for instance `shard-00000.safetensors` or `sglang/config.json`."""
    key: Key
    size: NonNegativeInt
    """Bytes."""
    blake3: Annotated[str, Field(pattern=patterns.BLAKE3)]
    meta: dict[str, Any] = Field(default_factory=dict)
    """Small facts about the file, for instance its sample and token counts."""


class Manifest(BaseModel):
    """What one attempt at one unit made."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = SCHEMA_VERSION
    stage: StageName
    unit_key: str
    tenant: str
    unit: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]
    fence: NonNegativeInt
    created_at: FiniteFloat
    files: list[FileEntry]
    summary: dict[str, Any]
    """The unit's result: a pure function of its inputs, never a time or a place."""
    contract: dict[str, Any] | None = None
    """Capture contract of hidden states (`eagle3_core.verifier.contract`)."""
    timings: dict[str, float] = Field(default_factory=dict)

    def content(self) -> str:
        """Digest of names, contents, summary and contract."""
        return digest_json(
            {
                "schema_version": self.schema_version,
                "stage": self.stage,
                "files": [[f.name, f.blake3] for f in self.files],
                "summary": self.summary,
                "contract": self.contract,
            }
        )

    def file(self, name: str) -> FileEntry:
        """The entry called `name`. Raises ObjectDamaged when the manifest lists none."""
        for entry in self.files:
            if entry.name == name:
                return entry
        raise ObjectDamaged(
            f"the manifest of {self.stage} unit {self.unit[0]} lists no {name}", remedy="run the stage again"
        )


class UnitWriter:
    """Collects a unit's files and commits them as one manifest."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        tenant: str,
        job_id: str,
        stage: StageName,
        unit: tuple[int, int, int],
        unit_key: str,
        fence: int,
    ) -> None:
        self._store = store
        self._draft = Manifest(
            stage=stage, unit_key=unit_key, tenant=tenant, unit=unit, fence=fence, created_at=0.0, files=[], summary={}
        )
        self._prefix = Attempt(tenant, stage, job_id, unit[0], fence).prefix + new_nonce()

    def _add(self, name: str, digest: str, size: int, meta: dict[str, Any]) -> FileEntry:
        key = f"{self._prefix}-{digest[:16]}-{name.replace('/', '.')}"
        entry = FileEntry(name=name, key=key, size=size, blake3=digest, meta=meta)
        self._draft.files.append(entry)
        return entry

    def add_file(self, name: str, path: Path, **meta: Any) -> FileEntry:
        """Store the file `path` as `name`."""
        entry = self._add(name, digest_file(path), path.stat().st_size, meta)
        self._store.put_file(entry.key, path)
        return entry

    def add_bytes(self, name: str, data: bytes, **meta: Any) -> FileEntry:
        """Store `data` as `name`."""
        entry = self._add(name, digest_bytes(data), len(data), meta)
        self._store.put_bytes(entry.key, data)
        return entry

    def add_json(self, name: str, value: Any, **meta: Any) -> FileEntry:
        """Store `value` as indented JSON."""
        return self.add_bytes(name, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), **meta)

    def commit(
        self, summary: dict[str, Any], *, contract: dict[str, Any] | None = None, timings: dict[str, float] | None = None
    ) -> ManifestRef:  # fmt: skip
        """Write the manifest and return where it lies. What was added before is now data."""
        manifest = self._draft.model_copy(
            update={"created_at": time.time(), "summary": summary, "contract": contract, "timings": timings or {}}
        )
        data = manifest.model_dump_json(indent=1).encode()
        key = f"{self._prefix}-{digest_bytes(data)[:16]}-manifest.json"
        self._store.put_bytes(key, data)
        return ManifestRef(key=key, blake3=digest_bytes(data), content=manifest.content())


def read_manifest(store: ObjectStore, ref: ManifestRef) -> Manifest:
    """The manifest at `ref`, checked against its digests. Raises ObjectMissing, ObjectDamaged."""
    data = _read_whole(store, ref)
    try:
        manifest = parse_model(Manifest, data)
        content = manifest.content()
    except ValueError as error:
        raise ObjectDamaged(f"{ref.key} is no manifest: {error}", remedy="run the stage again") from None
    if content != ref.content:
        raise ObjectDamaged(
            f"{ref.key} holds content {content[:16]}, its commit says {ref.content[:16]}", remedy="run the stage again"
        )
    return manifest


def _read_whole(store: ObjectStore, ref: ManifestRef) -> bytes:
    """The bytes at `ref`; read again if they were damaged, which may have happened on the way."""
    have = ""
    for _ in range(READS):
        data = store.get_bytes(ref.key)
        if (have := digest_bytes(data)) == ref.blake3:
            return data
    raise ObjectDamaged(
        f"{ref.key} hashes to {have[:16]}, its commit says {ref.blake3[:16]}", remedy="run the stage again"
    )


def fetch_file(store: ObjectStore, entry: FileEntry, folder: Path) -> Path:
    """The file of `entry` as a local path, its size and digest checked. Raises ObjectMissing, ObjectDamaged.

    A copy in `folder` that is damaged, which may have happened on the way, is thrown away and fetched again.
    """
    fault = ""
    for _ in range(READS):
        path = store.fetch(entry.key, folder)
        if not (fault := damage(path, entry)):
            return path
        if path.parent != folder:  # the object itself, not a copy
            break
        path.unlink()
    raise ObjectDamaged(
        f"{entry.name} ({entry.key}) {fault}",
        remedy="delete the object and retry the job from the stage that writes it",
    )


def damage(path: Path, entry: FileEntry) -> str:
    """How the file at `path` differs from `entry`; empty when it does not."""
    if (size := path.stat().st_size) != entry.size:
        return f"has {size} bytes, its manifest says {entry.size}: truncated or replaced"
    if (have := digest_file(path)) != entry.blake3:
        return f"hashes to {have[:16]}, its manifest says {entry.blake3[:16]}"
    return ""
