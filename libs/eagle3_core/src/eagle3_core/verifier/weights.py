"""The fingerprint of a checkpoint's weights, the shapes of its tensors, and whether they are all there.

Weights are known by the name and size of every file, its first and last MiB, and 4 KiB at the beginning of every tensor
and at every MiB of it (further apart in large checkpoints): a terabyte costs some hundred MiB of reads. A fine-tune saved
in place shows, since training moves every tensor, and so does a stretch that was lost or overwritten, from a MiB on
(16 MiB of a terabyte). A file cut short or a Git LFS pointer is refused: every header says how long its file must be. Pickles are refused
too: opening one runs its code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from eagle3_core.digests import digest_bytes, digest_json
from eagle3_core.verifier.folder import MAX_JSON_BYTES, VerifierWeights, read_json, refusal

MIB = 1 << 20
SAMPLE_BYTES = 4096
"""Read at each place of a tensor."""
MAX_PLACES = 1 << 16
"""Places that are read of a checkpoint besides the beginnings of its tensors: 256 MiB."""
COMPARED_PLACES = 64
"""Places at which two tensors are compared, spread evenly."""

ELEMENT_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Width of the element types whose width is a whole number of bytes; the format knows narrower ones too."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies: its file, its bytes from `start` to `stop` in it, its element type and its shape."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint: fingerprint (hex BLAKE3), and its tensors by name."""

    digest: str
    tensors: Mapping[str, TensorPlace]

    def find(self, ending: str) -> str | None:
        """Full name of the tensor whose name is or ends with `.ending`; the shortest where several do."""
        matches = [name for name in self.tensors if name == ending or name.endswith("." + ending)]
        return min(matches, key=len) if matches else None

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same, looked at in COMPARED_PLACES places."""
        a, b = self.tensors[one], self.tensors[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        step = max(SAMPLE_BYTES, (a.stop - a.start) // COMPARED_PLACES)
        with a.path.open("rb") as first, b.path.open("rb") as second:
            for offset in range(0, a.stop - a.start, step):
                length = min(SAMPLE_BYTES, a.stop - a.start - offset)
                first.seek(a.start + offset)
                second.seek(b.start + offset)
                if first.read(length) != second.read(length):
                    return False
        return True


def fingerprint(folder: Path) -> Weights:
    """The weights in `folder`. Raises VerifierWeights when they are missing, incomplete, damaged or pickled."""
    parts: list[list[Any]] = []
    tensors: dict[str, TensorPlace] = {}
    listed = _weight_files(folder)
    names = sorted(set(listed.values())) or ["model.safetensors"]
    stride = max(MIB, sum((folder / name).stat().st_size for name in names) // MAX_PLACES)
    for name in names:
        path = folder / name
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(MIB)
            file.seek(max(0, size - MIB))
            tail = file.read(MIB)
        places = _tensors(path, size, head)
        if twice := sorted(places.keys() & tensors.keys()):
            raise refusal(
                VerifierWeights,
                f"both {tensors[twice[0]].path.name} and {name} in {folder} hold {twice[0]}",
                "download the checkpoint again into an empty folder",
            )
        tensors.update(places)
        parts.append([name, size, digest_bytes(head), digest_bytes(tail), _samples(path, places, stride)])
    if listed:
        _agree_with_index(folder, listed, tensors)
    return Weights(digest_json(parts), tensors)


def _weight_files(folder: Path) -> dict[str, str]:
    """Which file holds which tensor, as the index says; empty where all lie in model.safetensors. Raises VerifierWeights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map: Any = read_json(index, VerifierWeights).get("weight_map")
        listed = {str(k): str(v) for k, v in weight_map.items()} if isinstance(weight_map, dict) else {}
        names = sorted(set(listed.values()))
        missing = [name for name in names if "/" in name or "\0" in name or not (folder / name).is_file()]
        if not names or missing:
            lack = (
                f"{len(missing)} of the {len(names)} files it lists, first {missing[0]!r:.200}"
                if missing
                else "its weight_map"
            )
            raise refusal(VerifierWeights, f"{index} lacks {lack}", "download the checkpoint again, completely")
        return listed
    if (folder / "model.safetensors").is_file():
        return {}
    pickled = next((p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth")), None)
    have = f"only {pickled}, a pickle, and those are never opened" if pickled else "none"
    raise refusal(
        VerifierWeights,
        f"{folder} has no safetensors weights (model.safetensors, or its index with all shards); it has {have}",
        "use the safetensors release of the model, or convert it with save_pretrained(folder)",
    )


def _agree_with_index(folder: Path, listed: Mapping[str, str], tensors: Mapping[str, TensorPlace]) -> None:
    """Raise VerifierWeights unless the files hold what the index lists, each tensor where it says, and nothing else."""
    there = {name: place.path.name for name, place in tensors.items()}
    odd = sorted(name for name in listed.keys() | there.keys() if listed.get(name) != there.get(name))
    if odd:
        said, have = listed.get(odd[0], "no file"), there.get(odd[0], "no file")
        raise refusal(
            VerifierWeights,
            f"model.safetensors.index.json of {folder.name} and its files differ in {len(odd)} tensors: the index puts "
            f"{odd[0]:.200} into {said}, and {have} holds it",
            "download the checkpoint again, index and files of one release",
        )


def _samples(path: Path, places: Mapping[str, TensorPlace], stride: int) -> str:
    """Digest of what lies at the beginning and at every `stride` bytes of every tensor of a file, in the file's order."""
    hasher = blake3()
    with path.open("rb") as file:
        for start, stop in sorted((place.start, place.stop) for place in places.values()):
            for place in range(start, stop, stride):
                file.seek(place)
                hasher.update(file.read(min(SAMPLE_BYTES, stop - place)))
    return hasher.hexdigest()


def _tensors(path: Path, size: int, head: bytes) -> dict[str, TensorPlace]:
    """Tensors of one file by name; its length must be what its header promises. Raises VerifierWeights.

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
        places = {str(n): _place(path, data, entry) for n, entry in header.items() if n != "__metadata__"}
        _check_layout(places, data, size)
        return places
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, MemoryError) as error:
        raise refusal(
            VerifierWeights,
            f"{path} is no whole safetensors file: {error or type(error).__name__}",
            "download this file again (a git checkout without LFS holds only pointers)",
        ) from None


def _place(path: Path, data: int, entry: Mapping[str, Any]) -> TensorPlace:
    """One entry of a header. Raises ValueError where it contradicts itself."""
    (start, stop), shape, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
    numbers = [start, stop, *shape]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers) or start > stop:
        raise ValueError(f"a tensor of shape {shape!r:.100} at bytes {start!r:.40} to {stop!r:.40}")
    bits = ELEMENT_BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != 8 * (stop - start):
        raise ValueError(f"a {dtype} tensor of shape {shape} in {stop - start} bytes")
    return TensorPlace(path, str(dtype), tuple(shape), data + start, data + stop)


def _check_layout(places: Mapping[str, TensorPlace], data: int, size: int) -> None:
    """Raise ValueError unless the tensors fill the file from `data` to its end, without holes, as the format demands."""
    end = data
    for place in sorted(places.values(), key=lambda place: (place.start, place.stop)):
        if place.start != end:
            raise ValueError("its tensors overlap or leave holes")
        end = place.stop
    if end != size:
        raise ValueError(f"it has {size} bytes, its header promises {end}")
