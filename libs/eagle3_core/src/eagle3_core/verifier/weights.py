"""The fingerprint of a checkpoint's weights, and whether they are all there.

Weights are known by name, size and the first and last MiB of every file: a terabyte checkpoint costs a few hundred MiB
of reads. A changed middle of equal size goes unseen; a file cut short or a Git LFS pointer does not, since every header
says how long its file must be. Pickles are refused: opening one runs its code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_core.digests import digest_bytes, digest_json
from eagle3_core.verifier.folder import MAX_JSON_BYTES, VerifierWeights, read_json, refusal

MIB = 1 << 20


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint: fingerprint (hex BLAKE3) and the names of their tensors."""

    digest: str
    tensors: frozenset[str]


def fingerprint(folder: Path) -> Weights:
    """The weights in `folder`. Raises VerifierWeights when they are missing, incomplete, damaged or pickled."""
    parts: list[list[Any]] = []
    tensors: set[str] = set()
    for name in _weight_files(folder):
        path = folder / name
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(MIB)
            file.seek(max(0, size - MIB))
            tail = file.read(MIB)
        tensors.update(_tensors(path, size, head))
        parts.append([name, size, digest_bytes(head), digest_bytes(tail)])
    return Weights(digest_json(parts), frozenset(tensors))


def _weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files that make up the weights. Raises VerifierWeights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map: Any = read_json(index, VerifierWeights).get("weight_map")
        names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
        missing = [name for name in names if "/" in name or not (folder / name).is_file()]
        if not names or missing:
            lack = (
                f"{len(missing)} of the {len(names)} files it lists, first {missing[0]}"
                if missing
                else "its weight_map"
            )
            raise refusal(VerifierWeights, f"{index} lacks {lack}", "download the checkpoint again, completely")
        return names
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    pickled = next((p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth")), None)
    have = f"only {pickled}, a pickle, and those are never opened" if pickled else "none"
    raise refusal(
        VerifierWeights,
        f"{folder} has no safetensors weights (model.safetensors, or its index with all shards); it has {have}",
        "use the safetensors release of the model, or convert it with save_pretrained(folder)",
    )


def _tensors(path: Path, size: int, head: bytes) -> set[str]:
    """Tensors of one file, whose length must be what its header promises. Raises VerifierWeights.

    The header's length stands in the first 8 bytes (safetensors format), little-endian.
    """
    length = int.from_bytes(head[:8], "little")
    try:
        if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
            raise ValueError("it has no safetensors header")
        with path.open("rb") as file:
            file.seek(8)
            header = json.loads(file.read(length))
        ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        promised = 8 + length + max(ends.values(), default=0)
        if promised != size:
            raise ValueError(f"it has {size} bytes, its header promises {promised}")
        return set(ends)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise refusal(
            VerifierWeights,
            f"{path} is no whole safetensors file: {error}",
            "download this file again (a git checkout without LFS holds only pointers)",
        ) from None
