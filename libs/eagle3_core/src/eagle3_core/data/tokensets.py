"""Tokenised samples as one file: what prepare and generate hand on, and every later stage slices.

Samples lie end to end (packed), so a set of a million samples is three arrays and not a million objects, and a unit's
slice is a view. The file is a safetensors file that any tool opens. Its bytes are a pure function of its content: names
and tasks travel as one metadata entry, because safetensors writes several entries in an order that changes by process.

Shapes: N tokens of all samples, S samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from eagle3_core.errors import AerieError
from eagle3_core.strict_json import parse_model

SCHEMA_VERSION = 1
Tokens = Sequence[int] | NDArray[Any]
Kind = TypeVar("Kind", bound=np.integer[Any])
_KEY = "tokenset"
_DTYPES = {"input_ids": np.int32, "loss_mask": np.uint8, "sample_offsets": np.int64}
_STORED = {"input_ids": "I32", "loss_mask": "U8", "sample_offsets": "I64"}


class TokenSetDamaged(AerieError):
    """A file of tokenised samples cannot be read, or contradicts itself."""

    code, status = "tokens.damaged", 500


class _Names(BaseModel):
    """The metadata entry of a file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: int
    ids: list[str]
    tasks: list[str]


@dataclass(frozen=True, eq=False)
class TokenSet:
    """Samples of tokens with their loss mask; sample i covers [sample_offsets[i], sample_offsets[i + 1])."""

    input_ids: NDArray[np.int32]
    """Token ids, i32 [N]."""
    loss_mask: NDArray[np.uint8]
    """1 where the token is the assistant's (its end-of-turn token included), u8 [N]."""
    sample_offsets: NDArray[np.int64]
    """Where samples begin and end, i64 [S + 1], first 0, last N."""
    ids: list[str]
    """Name of each sample."""
    tasks: list[str]
    """Task of each sample: the domain it is reported under."""

    def __post_init__(self) -> None:
        """Raises TokenSetDamaged when arrays, names and offsets do not fit one another."""
        fault = _fault(self)
        if fault:
            raise TokenSetDamaged(f"tokenised samples do not fit together: {fault}", remedy="run the stage again")

    @classmethod
    def build(cls, samples: Iterable[tuple[str, str, Tokens, Tokens]]) -> TokenSet:
        """A set of (id, task, token ids [T], mask [T]) samples, in the given order."""
        rows = list(samples)
        lengths = [len(tokens) for _, _, tokens, _ in rows]
        return cls(
            input_ids=_packed([tokens for _, _, tokens, _ in rows], np.int32),
            loss_mask=_packed([mask for _, _, _, mask in rows], np.uint8),
            sample_offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            ids=[name for name, _, _, _ in rows],
            tasks=[task for _, task, _, _ in rows],
        )

    @classmethod
    def concat(cls, sets: Sequence[TokenSet]) -> TokenSet:
        """The samples of all `sets`, in order."""
        lengths = [s.lengths for s in sets]
        return cls(
            input_ids=_packed([s.input_ids for s in sets], np.int32),
            loss_mask=_packed([s.loss_mask for s in sets], np.uint8),
            sample_offsets=np.concatenate([[0], np.cumsum(_packed(lengths, np.int64))]).astype(np.int64),
            ids=[name for s in sets for name in s.ids],
            tasks=[task for s in sets for task in s.tasks],
        )

    @classmethod
    def load(cls, path: Path) -> TokenSet:
        """The set in the file `path`. Raises TokenSetDamaged that names the file and what is wrong with it."""
        try:
            with safe_open(path, framework="numpy") as file:
                names = _names((file.metadata() or {})[_KEY])
                arrays = {key: _array(file, key) for key in _DTYPES}
            return cls(**arrays, ids=names.ids, tasks=names.tasks)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise TokenSetDamaged(
                f"{path} is no file of tokenised samples: {reason}", remedy="run the stage that wrote it again"
            ) from error
        except TokenSetDamaged as error:
            raise TokenSetDamaged(f"{path}: {error.detail}", remedy=error.remedy) from None

    def save(self, path: Path) -> None:
        """Write the set to `path`. Equal sets give equal bytes."""
        names = {"schema_version": SCHEMA_VERSION, "ids": self.ids, "tasks": self.tasks}
        tensors = {key: np.ascontiguousarray(getattr(self, key)) for key in _DTYPES}
        save_file(tensors, path, metadata={_KEY: json.dumps(names)})

    def __len__(self) -> int:
        """Number of samples, S."""
        return len(self.ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, i64 [S]."""
        return np.diff(self.sample_offsets)

    @property
    def tokens(self) -> int:
        """Number of tokens, N."""
        return len(self.input_ids)

    @property
    def labelled(self) -> int:
        """Positions whose final state some label rule reads: p with mask[p-1], mask[p] or mask[p+1] (at most, at samples' ends)."""
        mask = np.pad(self.loss_mask.astype(bool), 1)
        return int((mask[:-2] | mask[1:-1] | mask[2:]).sum())

    @property
    def supervised_tokens(self) -> int:
        """Number of tokens whose mask is 1."""
        return int(self.loss_mask.sum(dtype=np.int64))

    def sample(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids i32 [T] and mask u8 [T] of one sample, as views. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        span = slice(int(self.sample_offsets[index]), int(self.sample_offsets[index + 1]))
        return self.input_ids[span], self.loss_mask[span]

    def slice(self, start: int, stop: int) -> TokenSet:
        """Samples `start` (inclusive) to `stop` (exclusive). Raises IndexError when they are not all there."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"samples {start} to {stop} of {len(self)}")
        first, last = int(self.sample_offsets[start]), int(self.sample_offsets[stop])
        return TokenSet(
            input_ids=self.input_ids[first:last],
            loss_mask=self.loss_mask[first:last],
            sample_offsets=self.sample_offsets[start : stop + 1] - first,
            ids=self.ids[start:stop],
            tasks=self.tasks[start:stop],
        )


def _names(text: str) -> _Names:
    """The metadata entry `text`. Raises ValueError."""
    names = parse_model(_Names, text)
    if names.schema_version != SCHEMA_VERSION:
        raise ValueError(f"schema version {names.schema_version}, this reader knows {SCHEMA_VERSION}")
    return names


def _array(file: Any, key: str) -> NDArray[Any]:
    """The tensor `key` of an open file. Its header is looked at first: not every dtype of the format has one in numpy."""
    stored = file.get_slice(key)
    found, wanted = stored.get_dtype(), _STORED[key]
    if found != wanted or len(stored.get_shape()) != 1:
        raise ValueError(f"{key} is {found} {stored.get_shape()}, not {wanted} with one dimension")
    return file.get_tensor(key)


def _packed(parts: Sequence[Tokens], dtype: type[Kind]) -> NDArray[Kind]:
    try:
        return np.concatenate([np.asarray(part, dtype=dtype) for part in parts]) if parts else np.zeros(0, dtype)
    except OverflowError as error:
        raise TokenSetDamaged(f"a token or a mask value is out of range: {error}", remedy="tokenise again") from None


def _fault(tokens: TokenSet) -> str:
    """What contradicts itself in `tokens`, or an empty string."""
    for key, dtype in _DTYPES.items():
        array = getattr(tokens, key)
        if array.dtype != dtype or array.ndim != 1:
            return f"{key} is {array.dtype}{list(array.shape)}, not {np.dtype(dtype)} with one dimension"
    total, offsets = len(tokens.input_ids), tokens.sample_offsets
    if len(tokens.loss_mask) != total:
        return f"{total} tokens, {len(tokens.loss_mask)} mask values"
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != total or (np.diff(offsets) < 0).any():
        return f"sample_offsets do not rise from 0 to {total}"
    if not len(tokens.ids) == len(tokens.tasks) == len(offsets) - 1:
        return f"{len(offsets) - 1} samples, {len(tokens.ids)} ids, {len(tokens.tasks)} tasks"
    if total and int(tokens.loss_mask.max()) > 1:
        return "loss_mask holds values other than 0 and 1"
    if total and int(tokens.input_ids.min()) < 0:
        return f"a token has the number {int(tokens.input_ids.min())}"
    return ""
