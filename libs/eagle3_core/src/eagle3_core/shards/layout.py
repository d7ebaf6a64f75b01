"""What a shard's file must look like: its header, and how its small tensors fit one another. Readable without torch.

Whoever reads shards asks here, training and `aerie inspect` alike, so that what one calls whole the other does too. A
fault is said in one sentence; the reader adds which file it is.

Shapes: N tokens of a shard, S samples, M kept final states, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from eagle3_core.errors import AerieError
from eagle3_core.strict_json import parse_model

SCHEMA_VERSION = 1
METADATA_KEY = "shard"
INDEX_DTYPES: Mapping[str, str] = {"input_ids": "I32", "loss_mask": "U8", "sample_offsets": "I64", "final_index": "I32"}
"""The tensors that every codec stores alike, each of one dimension, with their dtypes as safetensors names them."""


class UnknownCodec(AerieError):
    """The shard is stored in a way that this version does not know."""

    code, status = "shards.codec", 422


class ShardHeader(BaseModel):
    """The metadata of a shard."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    codec: str
    ids: list[str]
    tasks: list[str]


class Counted(Protocol):
    """What a manifest says a shard holds."""

    samples: int
    tokens: int
    supervised_tokens: int
    final_states: int


@dataclass(frozen=True)
class Index:
    """The small tensors of a shard."""

    input_ids: NDArray[Any]
    """i32 [N]"""
    loss_mask: NDArray[Any]
    """u8 [N]"""
    sample_offsets: NDArray[Any]
    """i64 [S + 1]"""
    final_index: NDArray[Any]
    """i32 [M]"""

    @property
    def supervised_tokens(self) -> int:
        """Tokens whose mask is 1."""
        return int(self.loss_mask.sum(dtype=np.int64))


def read_header(metadata: Mapping[str, str]) -> ShardHeader:
    """The shard header in a file's metadata. Raises KeyError where there is none, ValueError where it is not one."""
    header = parse_model(ShardHeader, metadata[METADATA_KEY])
    if header.schema_version != SCHEMA_VERSION:
        raise ValueError(f"schema version {header.schema_version}, this reader knows {SCHEMA_VERSION}")
    return header


def index_fault(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    """What is wrong with dtype or shape of the small tensor `name`, or an empty string."""
    wanted = INDEX_DTYPES[name]
    return (
        ""
        if dtype == wanted and len(shape) == 1
        else f"{name} is {dtype} {list(shape)}, not {wanted} with one dimension"
    )


def fault(header: ShardHeader, index: Index, counts: Counted | None, vocab_size: int | None) -> str:
    """What contradicts itself in a shard, or an empty string. `counts`, `vocab_size`: where a manifest says them."""
    tokens, offsets, final = len(index.input_ids), index.sample_offsets, index.final_index
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != tokens or not (np.diff(offsets) > 0).all():
        return f"sample_offsets do not rise from 0 to {tokens}"
    if not len(header.ids) == len(header.tasks) == len(offsets) - 1:
        return f"{len(offsets) - 1} samples, {len(header.ids)} ids, {len(header.tasks)} tasks"
    if len(index.loss_mask) != tokens:
        return f"{tokens} tokens, {len(index.loss_mask)} mask values"
    if tokens and int(index.loss_mask.max()) > 1:
        return "loss_mask holds values other than 0 and 1"
    if tokens and (outside := _outside(index.input_ids, vocab_size)):
        return outside
    if len(final) and not (final[0] >= 0 and final[-1] < tokens and (np.diff(final.astype(np.int64)) > 0).all()):
        return f"final_index does not rise within 0..{tokens - 1}"
    return _miscounted(index, counts) if counts is not None else ""


def states_fault(index: Index, aux: tuple[int, ...], final: tuple[int, ...], hidden_size: int | None) -> str:
    """Why states of these shapes do not belong to `index`, or an empty string. `hidden_size`: where a contract says it."""
    width = hidden_size if hidden_size is not None else (final[1] if len(final) == 2 else 0)
    tokens, kept = len(index.input_ids), len(index.final_index)
    if aux == (tokens, 3 * width) and final == (kept, width) and width > 0:
        return ""
    named = f" of hidden size {hidden_size}" if hidden_size is not None else ""
    return (
        f"aux {list(aux)} and final {list(final)} do not fit {tokens} tokens, {kept} of them with a final state{named}"
    )


def _outside(ids: NDArray[Any], vocab_size: int | None) -> str:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        beyond = "and up" if vocab_size is None else f"to {vocab_size - 1}"
        return f"it holds token {low if low < 0 else high}, tokens go from 0 {beyond}"
    return ""


def _miscounted(index: Index, counts: Counted) -> str:
    have = {
        "samples": len(index.sample_offsets) - 1, "tokens": len(index.input_ids),
        "supervised_tokens": index.supervised_tokens, "final_states": len(index.final_index),
    }  # fmt: skip
    for name, count in have.items():
        if count != getattr(counts, name):
            return f"{getattr(counts, name)} {name.replace('_', ' ')} in the manifest, {count} in the file"
    return ""
