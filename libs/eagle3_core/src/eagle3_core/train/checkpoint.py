"""Checkpoints in the object store: written whole, found by provenance, skipped loudly when damaged.

A checkpoint is one safetensors file (weights and optimizer state, float32) and a marker, written last, that carries the
file's size and digest, the provenance (the unit's key: same data, same settings) and the trainer's cursor. Only a file
that a marker names counts. Keys carry step, fence and content, so attempts never overwrite each other and any
attempt may go on from any other's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3_core.digests import digest_file
from eagle3_core.objects.keys import Training
from eagle3_core.objects.protocol import ObjectMissing, ObjectStore
from eagle3_core.train.streamed import write_tensors

FORMAT_VERSION = 1
MARKER = "complete.json"


class Marker(BaseModel):
    """What makes a checkpoint count."""

    model_config = ConfigDict(extra="forbid")

    format_version: int = FORMAT_VERSION
    provenance: str
    """Key of the unit whose training this is."""
    step: int
    """Optimizer steps done."""
    fence: int
    key: str
    size: int
    blake3: str
    cursor: dict[str, Any]
    """Where the trainer was; opaque here."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint, read and checked."""

    marker: Marker
    tensors: dict[str, Tensor]


class Checkpoints:
    """The checkpoints of one training unit."""

    def __init__(
        self, store: ObjectStore, *, tenant: str, provenance: str, fence: int, keep: int, scratch: Path,
        warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._store, self._fence, self._keep, self._scratch, self._warn = store, fence, keep, scratch, warn
        self._provenance = provenance
        self._prefix = Training(tenant, provenance).prefix

    def save(self, step: int, tensors: dict[str, Tensor], cursor: dict[str, Any]) -> Marker:
        """Store a checkpoint of `step` steps; then older ones beyond `keep` are deleted. Raises StoreFull.

        `tensors`, float32 on any device, is emptied: each leaves its device when it is written.
        """
        path = self._scratch / "checkpoint.safetensors"
        digest, size = write_tensors(path, tensors)
        stem = f"{self._prefix}{step:08d}-{self._fence:06d}"
        key = f"{stem}-{digest[:16]}-state.safetensors"
        self._store.put_file(key, path)
        path.unlink()
        marker = Marker(
            provenance=self._provenance, step=step, fence=self._fence, key=key, size=size, blake3=digest, cursor=cursor
        )
        self._store.put_bytes(f"{stem}-{MARKER}", marker.model_dump_json(indent=1).encode())
        self._forget_old()
        return marker

    def latest(self) -> Restored | None:
        """The newest whole checkpoint of this unit; a damaged one is warned about and passed over."""
        for key in self._markers():
            restored = self._read(key)
            if restored is not None:
                return restored
        return None

    def discard(self) -> None:
        """Delete every checkpoint of this unit."""
        for stat in list(self._store.list(self._prefix)):
            self._store.delete(stat.key)

    def _markers(self) -> Iterator[str]:
        keys = [stat.key for stat in self._store.list(self._prefix) if stat.key.endswith(MARKER)]
        yield from sorted(keys, reverse=True)

    def _read(self, marker_key: str) -> Restored | None:
        try:
            marker = Marker.model_validate_json(self._store.get_bytes(marker_key))
            fault = self._fault(marker)
            if fault is None:
                path = self._store.fetch(marker.key, self._scratch)
                fault = _damage(path, marker)
                if fault is None:
                    return Restored(marker, load_file(path))
        except (ValidationError, ObjectMissing, SafetensorError) as error:
            fault = str(error).splitlines()[0]
        self._warn(f"checkpoint {marker_key} is passed over: {fault}")
        return None

    def _fault(self, marker: Marker) -> str | None:
        if marker.format_version != FORMAT_VERSION:
            return f"it has format {marker.format_version}, this version reads {FORMAT_VERSION}"
        if marker.provenance != self._provenance:
            return f"it belongs to unit {marker.provenance[:16]}, this is {self._provenance[:16]}"
        return None

    def _forget_old(self) -> None:
        """Delete all but the newest `keep`; the marker first, so that what remains of a deletion never counts."""
        markers = list(self._markers())
        kept = {key.removesuffix(f"-{MARKER}").rpartition("/")[2] for key in markers[: self._keep]}
        oldest = min(kept)
        for key in markers[self._keep :]:
            self._store.delete(key)
        for stat in list(self._store.list(self._prefix)):
            stem = "-".join(stat.key.removeprefix(self._prefix).split("-")[:2])
            if stem not in kept and stem < oldest:
                self._store.delete(stat.key)


def _damage(path: Path, marker: Marker) -> str | None:
    if (size := path.stat().st_size) != marker.size:
        return f"its file has {size} bytes, its marker says {marker.size}"
    if (have := digest_file(path)) != marker.blake3:
        return f"its file hashes to {have[:16]}, its marker says {marker.blake3[:16]}"
    return None
