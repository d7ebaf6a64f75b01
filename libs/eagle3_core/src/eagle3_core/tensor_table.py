"""Which tensors a safetensors file holds and where, read and checked without a tensor library.

A file begins with 8 bytes, the header's length (little-endian), and the header: a JSON object from names to dtype, shape
and place. Here the rules of the format hold in full (https://huggingface.co/docs/safetensors): the tensors cover the
rest of the file exactly, without a gap or an overlap, and each is as long as its shape says. So a file cut short, padded
or spliced is found from its first kilobytes, whatever reads its tensors later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from eagle3_core import strict_json

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
LENGTH_BYTES = 8
ALIGNMENT = 8
"""The header's length is a multiple of it, as the format asks."""
_LARGEST = (1 << 64) - 1

BITS: Mapping[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of one element of every dtype of the format (safetensors 0.8)."""


@dataclass(frozen=True)
class Entry:
    """One tensor: its dtype and shape as the header says them, and its first and last byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Table:
    """The tensors of one file, by name, and its metadata."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def head_of(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """What a file of `tensors` (dtype as the format names it, and shape) begins with; their bytes follow in that order."""
    entries: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_table(path: Path) -> Table:
    """The table of the safetensors file `path`. Raises OSError, and ValueError that says what is wrong with the file."""
    if not path.is_file():  # a pipe would be waited for
        raise ValueError("it is no file" if path.exists() else "it does not exist")
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > size - LENGTH_BYTES:
            raise ValueError(f"it has {size} bytes, too few for its header")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header claims {length} bytes, the format allows {MAX_HEADER_BYTES}")
        raw = file.read(length)
    try:
        header = strict_json.loads_object(raw)
    except ValueError as error:
        raise ValueError(f"its header is not the JSON of a safetensors file: {error}") from None
    metadata = header.pop("__metadata__", None)
    begin = LENGTH_BYTES + length
    entries = {name: _entry(name, entry, begin) for name, entry in header.items()}
    _covered(entries, begin, size)
    return Table(entries, _metadata(metadata))


def _entry(name: str, entry: Any, begin: int) -> Entry:
    fields: tuple[Any, ...] = (
        tuple(entry.get(key) for key in ("dtype", "shape", "data_offsets")) if isinstance(entry, dict) else (None,) * 3
    )
    dtype, shape, offsets = fields
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"tensor {name} has dtype {str(dtype)[:40]}")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise ValueError(f"tensor {name} has shape {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise ValueError(f"tensor {name} lies at {str(offsets)[:80]}")
    start, stop = offsets
    bits = BITS[dtype]
    for count in shape:
        bits *= count
        if bits > _LARGEST:
            raise ValueError(f"tensor {name} has shape {str(shape)[:80]}, which no memory holds")
    if bits % 8 or stop - start != bits // 8:
        raise ValueError(f"tensor {name}, {dtype} {shape}, takes {bits / 8:g} bytes, its place has {stop - start}")
    return Entry(dtype, tuple(shape), begin + start, begin + stop)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _covered(entries: Mapping[str, Entry], begin: int, size: int) -> None:
    """Raise ValueError unless the tensors lie end to end from byte `begin` to byte `size`."""
    at = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != at:
            raise ValueError(f"tensor {name} begins at byte {entry.start}, the one before it ends at {at}")
        at = entry.stop
    if at != size:
        fault = "the file is truncated" if at > size else "what follows belongs to no tensor"
        raise ValueError(f"it has {size} bytes, its header places tensors up to byte {at}: {fault}")


def _metadata(metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is not a map of strings")
    return metadata
