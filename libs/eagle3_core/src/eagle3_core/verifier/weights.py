"""The fingerprint of a checkpoint's weights, and whether they are all there.

Weights are known by the name and size of every file, its first and last MiB, and the first 4 KiB of every tensor: a
terabyte checkpoint costs some hundred MiB of reads, and a fine-tune saved in place shows, since training moves every
tensor. A file cut short or a Git LFS pointer is refused: every header says how long its file must be. Pickles are refused
too: opening one runs its code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from eagle3_core.digests import digest_bytes, digest_json
from eagle3_core.verifier.folder import MAX_JSON_BYTES, VerifierWeights, read_json, refusal

MIB = 1 << 20
SAMPLE_BYTES = 4096
"""Read of each tensor."""


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
        places = _tensors(path, size, head)
        tensors.update(places)
        parts.append([name, size, digest_bytes(head), digest_bytes(tail), _samples(path, places)])
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


def _samples(path: Path, places: dict[str, tuple[int, int]]) -> str:
    """Digest of the beginning of every tensor of a file, in the order of the file."""
    hasher = blake3()
    with path.open("rb") as file:
        for start, stop in sorted(places.values()):
            file.seek(start)
            hasher.update(file.read(min(SAMPLE_BYTES, stop - start)))
    return hasher.hexdigest()


def _tensors(path: Path, size: int, head: bytes) -> dict[str, tuple[int, int]]:
    """Tensors of one file and their first and last byte; its length must be what its header promises. Raises VerifierWeights.

    The header's length stands in the first 8 bytes (safetensors format), little-endian.
    """
    length = int.from_bytes(head[:8], "little")
    try:
        if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
            raise ValueError("it has no safetensors header")
        with path.open("rb") as file:
            file.seek(8)
            header = json.loads(file.read(length))
        data = 8 + length
        places = {
            str(name): (data + int(entry["data_offsets"][0]), data + int(entry["data_offsets"][1]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
        if any(not data <= start <= stop for start, stop in places.values()):
            raise ValueError("its header places a tensor outside the file")
        promised = max((stop for _, stop in places.values()), default=data)
        if promised != size:
            raise ValueError(f"it has {size} bytes, its header promises {promised}")
        return places
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise refusal(
            VerifierWeights,
            f"{path} is no whole safetensors file: {error}",
            "download this file again (a git checkout without LFS holds only pointers)",
        ) from None
