"""Random access to the samples of many shards.

Every file is fetched and its size and BLAKE3 checked once, before any compute; afterwards samples are slices of memory-
mapped files, of which a few stay open. Contracts of all units must agree. What is wrong names the file and the sample.

Shapes: S samples, N tokens of a shard, T tokens of a sample, M kept final states, H hidden size.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3_core.objects.manifest import FileEntry, Manifest, fetch_file
from eagle3_core.objects.protocol import ObjectStore
from eagle3_core.shards.codecs import Codec, codec_called
from eagle3_core.shards.format import Sample, check_sample
from eagle3_core.shards.layout import (
    INDEX_DTYPES,
    Index,
    ShardHeader,
    UnknownCodec,
    fault,
    index_fault,
    read_header,
    states_fault,
)
from eagle3_core.shards.manifest import ShardCounts, ShardDamaged, shard_entries, shared_contract
from eagle3_core.verifier.contract import CaptureContract

OPEN_FILES = 16


@dataclass(frozen=True)
class _Open:
    """An open shard: its small tensors in memory, its states on disk."""

    file: Any
    codec: Codec
    header: ShardHeader
    input_ids: Tensor
    loss_mask: Tensor
    sample_offsets: Tensor
    final_index: Tensor


class ShardSet:
    """The samples of `manifests`, in their order. `sample(i)` reads one of `len()`; many threads may read at once."""

    contract: CaptureContract
    """How all of them were captured."""
    lengths: Tensor
    """i64 [S]: tokens of each sample."""

    def __init__(self, store: ObjectStore, manifests: Sequence[Manifest], scratch: Path) -> None:
        """Fetch and check every shard; remote ones are kept under `scratch`.

        Raises ShardDamaged, ObjectDamaged, ObjectMissing (each names the file), ContractMismatch.
        """
        if not manifests:
            raise ShardDamaged("there are no shards to read", remedy="run extract first")
        self.contract = shared_contract(manifests)
        self._entries = [pair for manifest in manifests for pair in shard_entries(manifest)]
        self._paths = [fetch_file(store, entry, scratch) for entry, _ in self._entries]
        self._opened: OrderedDict[int, _Open] = OrderedDict()
        self._lock = threading.Lock()
        self._first = [0, *accumulate(counts.samples for _, counts in self._entries)]
        parts = [self._shard(i).sample_offsets.diff() for i in range(len(self._entries))]
        self.lengths = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def __len__(self) -> int:
        """Number of samples, S."""
        return self._first[-1]

    def sample(self, index: int) -> Sample:
        """Sample `index`, its states as stored. Raises StatesNotFinite and ShardDamaged (naming it), IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which = bisect_right(self._first, index) - 1
        shard, inner = self._shard(which), index - self._first[which]
        start, stop = int(shard.sample_offsets[inner]), int(shard.sample_offsets[inner + 1])
        bounds = torch.tensor([start, stop], dtype=torch.int32)
        low, high = torch.searchsorted(shard.final_index, bounds).tolist()
        sample = Sample(
            id=shard.header.ids[inner],
            task=shard.header.tasks[inner],
            input_ids=shard.input_ids[start:stop],
            loss_mask=shard.loss_mask[start:stop],
            aux=shard.codec.decode(shard.file, "aux", start, stop),
            final=shard.codec.decode(shard.file, "final", low, high),
            final_index=shard.final_index[low:high] - start,
        )
        check_sample(sample, self.contract)
        return sample

    def loss_mask(self, index: int) -> Tensor:
        """u8 [T]: the mask of sample `index`, without reading its states. Raises ShardDamaged, IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which = bisect_right(self._first, index) - 1
        shard, inner = self._shard(which), index - self._first[which]
        return shard.loss_mask[int(shard.sample_offsets[inner]) : int(shard.sample_offsets[inner + 1])]

    def _shard(self, which: int) -> _Open:
        with self._lock:
            if which in self._opened:
                self._opened.move_to_end(which)
                return self._opened[which]
            shard = self._opened[which] = _open(self._paths[which], *self._entries[which], self.contract)
            if len(self._opened) > OPEN_FILES:
                self._opened.popitem(last=False)
            return shard


def _open(path: Path, entry: FileEntry, counts: ShardCounts, contract: CaptureContract) -> _Open:
    """The shard at `path`. Raises ShardDamaged, naming the file, where it is not what entry and contract say."""
    try:
        file = safe_open(path, framework="pt")
        header = read_header(file.metadata() or {})
        tensors = {name: _small(file, name) for name in INDEX_DTYPES}
        codec = codec_called(header.codec)
        index = Index(**{name: tensor.numpy() for name, tensor in tensors.items()})
        wrong = fault(header, index, counts, contract.vocab_size) or states_fault(
            index, codec.shape(file, "aux"), codec.shape(file, "final"), contract.hidden_size
        )
        if wrong:
            raise ValueError(wrong)
    except UnknownCodec as error:
        raise UnknownCodec(
            f"{entry.name} ({entry.key}): {error.detail}", remedy=error.remedy, file=entry.name
        ) from None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ShardDamaged(
            f"{entry.name} ({entry.key}) is no good shard: {reason}", remedy="run extract again", file=entry.name
        ) from error
    return _Open(file, codec, header, **tensors)


def _small(file: Any, name: str) -> Tensor:
    """The small tensor `name`. Its header is looked at first: not every dtype of the format has one in torch."""
    stored = file.get_slice(name)
    if wrong := index_fault(name, stored.get_dtype(), tuple(stored.get_shape())):
        raise ValueError(wrong)
    return file.get_tensor(name)
