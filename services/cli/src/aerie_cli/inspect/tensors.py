"""The tensors of a safetensors file, read in pieces and without torch, bfloat16 included.

numpy has no bfloat16 and no 8-bit floats, so those are read as their bit patterns: whether such a number is finite shows
in its bits. The file is read, not mapped: one that is cut short meanwhile is an error here and not the end of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from aerie_cli.inspect.kinds import looks_like
from eagle3_core.errors import AerieError
from eagle3_core.tensor_table import Entry, Table, read_table

PIECE_BYTES = 8 << 20
PLAIN: Mapping[str, Any] = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F16": np.float16,
    "F32": np.float32, "F64": np.float64,
}  # fmt: skip
"""Dtypes that numpy has."""


def _masked(dtype: Any, mask: int, value: int) -> tuple[Any, Callable[[NDArray[Any]], NDArray[np.bool_]]]:
    return dtype, lambda bits: (bits & dtype(mask)) == dtype(value)


NOT_FINITE: Mapping[str, tuple[Any, Callable[[NDArray[Any]], NDArray[np.bool_]]]] = {
    "BF16": _masked(np.uint16, 0x7F80, 0x7F80),
    "F8_E5M2": _masked(np.uint8, 0x7C, 0x7C),
    "F8_E4M3": _masked(np.uint8, 0x7F, 0x7F),
    **{name: (PLAIN[name], lambda piece: ~np.isfinite(piece)) for name in ("F16", "F32", "F64")},
}
"""Of floating dtypes: how to read them, and which of their elements are NaN or infinite."""


class NotTensors(AerieError):
    """The file is no whole safetensors file."""

    code, status = "inspect.tensors", 422


@dataclass(frozen=True)
class Scan:
    """What reading a tensor through shows."""

    not_finite: int
    """Elements that are NaN or infinite; none of a dtype that has no such numbers."""
    digest: str
    """Hex BLAKE3 of its bytes."""


class Tensors:
    """The tensors of one file."""

    def __init__(self, path: Path) -> None:
        """Raises NotTensors that says what is wrong with the file."""
        self.path = path
        try:
            self._table: Table = read_table(path)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and (kind := looks_like(path)) is not None:
                raise NotTensors(
                    f"{path} is no safetensors file: it looks like {kind}",
                    remedy="name a *.safetensors file: a job's shards lie in its house under objects/TENANT/extract/JOB, a "
                    "drafter is what `aerie download JOB` wrote",
                ) from None
            raise self._fault(error) from None

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Every tensor's dtype, shape and place, by name."""
        return self._table.entries

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's metadata."""
        return self._table.metadata

    def array(self, name: str) -> NDArray[Any]:
        """The elements of one tensor, in one dimension. Raises NotTensors for a dtype that numpy has not."""
        entry = self.entries[name]
        if entry.dtype not in PLAIN:
            raise self._fault(ValueError(f"tensor {name} has dtype {entry.dtype}"))
        pieces = [np.frombuffer(piece, PLAIN[entry.dtype]) for piece in self._pieces(entry)]
        return np.concatenate(pieces) if pieces else np.zeros(0, PLAIN[entry.dtype])

    def scan(self, name: str) -> Scan:
        """Read one tensor through."""
        entry = self.entries[name]
        dtype, bad = NOT_FINITE.get(entry.dtype, (None, None))
        hasher, found = blake3(), 0
        for piece in self._pieces(entry):
            hasher.update(piece)
            if bad is not None:
                found += int(bad(np.frombuffer(piece, dtype)).sum())
        return Scan(found, hasher.hexdigest())

    def _pieces(self, entry: Entry) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                file.seek(entry.start)
                for at in range(entry.start, entry.stop, PIECE_BYTES):
                    wanted = min(PIECE_BYTES, entry.stop - at)
                    piece = file.read(wanted)
                    if len(piece) < wanted:
                        raise ValueError("it was cut short while it was read")
                    yield piece
        except (OSError, ValueError) as error:
            raise self._fault(error) from None

    def _fault(self, error: Exception) -> NotTensors:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return NotTensors(f"{self.path} is no whole safetensors file: {reason}", remedy="make it or download it again")
