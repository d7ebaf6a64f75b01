"""A safetensors file as numpy arrays, bfloat16 included, read in place.

numpy has no bfloat16, so such a tensor is read as its 16-bit patterns: they are the upper halves of float32 values,
and whether one is finite shows in its exponent alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3_core.errors import AerieError

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F16": np.float16,
    "F32": np.float32, "F64": np.float64, "BF16": np.uint16,
}  # fmt: skip
_EXPONENT = np.uint16(0x7F80)
LARGEST_HEADER = 100 << 20
ROWS_AT_ONCE = 4096


class NotTensors(AerieError):
    """The file is no whole safetensors file."""

    code, status = "inspect.tensors", 422


@dataclass(frozen=True)
class Stored:
    """One tensor: its dtype as the file says it, its shape, its elements (bit patterns for BF16)."""

    dtype: str
    array: NDArray[Any]

    def not_finite(self) -> int:
        """How many elements are NaN or infinite; reads the tensor in pieces."""
        if self.dtype not in ("BF16", "F16", "F32", "F64"):
            return 0
        flat = self.array.reshape(-1, self.array.shape[-1]) if self.array.ndim > 1 else self.array.reshape(1, -1)
        found = 0
        for start in range(0, len(flat), ROWS_AT_ONCE):
            piece = flat[start : start + ROWS_AT_ONCE]
            bad = (piece & _EXPONENT) == _EXPONENT if self.dtype == "BF16" else ~np.isfinite(piece)
            found += int(bad.sum())
        return found


def read_tensors(path: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The tensors and the metadata of `path`. Raises NotTensors that says what is wrong."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(LARGEST_HEADER, size - 8):
                raise ValueError("its header is longer than the file")
            header: Any = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is not an object")
        raw = np.memmap(path, np.uint8, "r")
        return {
            name: _tensor(name, entry, raw[8 + length :]) for name, entry in header.items() if name != "__metadata__"
        }, header.get("__metadata__") or {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise NotTensors(
            f"{path} is no whole safetensors file: {reason}", remedy="make it or download it again"
        ) from None


def _tensor(name: str, entry: dict[str, Any], data: NDArray[np.uint8]) -> Stored:
    start, stop = entry["data_offsets"]
    if not 0 <= start <= stop <= len(data):
        raise ValueError(f"tensor {name} ends at byte {stop} of {len(data)}: the file is truncated")
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"tensor {name} has dtype {entry['dtype']}")
    return Stored(entry["dtype"], np.frombuffer(data[start:stop], dtype).reshape(entry["shape"]))
