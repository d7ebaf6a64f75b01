"""Packs samples into shards in a scratch folder; `close` hands them to a unit's output.

Samples keep the order in which they come, which is the order in which a batch finishes them: memory holds one shard
and never a unit. The output is named only at the end, since the key of states that `generate` kept depends on the
answers that came with them. Every state passes `check_sample` here, whichever engine and pass it came from.

Shapes: T tokens of a sample, M kept final states, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3_core.objects.manifest import UnitWriter
from eagle3_core.shards.codecs import codec_called
from eagle3_core.shards.format import Sample, check_sample, kept_positions
from eagle3_core.shards.layout import METADATA_KEY, ShardHeader
from eagle3_core.shards.manifest import ShardCounts, shard_name
from eagle3_core.verifier.base import States
from eagle3_core.verifier.contract import CaptureContract

HEADER_BYTES = 2048
"""Room for the tensors' entries in the file's header."""


class ShardWriter:
    """The shards of one unit. `add` every sample, then `close`; committing the unit is the caller's."""

    def __init__(self, scratch: Path, contract: CaptureContract, *, codec: str, shard_bytes: int) -> None:
        """`shard_bytes`: largest file, unless one sample alone is larger."""
        self._scratch, self.contract = scratch, contract
        self._codec, self._limit = codec_called(codec), shard_bytes
        self._waiting: list[Sample] = []
        self._bytes = HEADER_BYTES
        self._written: list[tuple[Path, ShardCounts]] = []

    def add(
        self, sample_id: str, task: str, input_ids: Sequence[int], loss_mask: Sequence[int], states: States
    ) -> None:
        """Store a sample of T tokens with its T states. Raises SampleRefused, StatesNotFinite."""
        mask = torch.as_tensor(loss_mask, dtype=torch.uint8)
        index = kept_positions(mask)
        final = states.final[index.long()] if len(mask) == len(states.final) else states.final
        ids = torch.as_tensor(input_ids, dtype=torch.int32)
        sample = Sample(sample_id, task, ids, mask, states.aux, final, index)
        check_sample(sample, self.contract)
        size = self._size(sample)
        if self._waiting and self._bytes + size > self._limit:
            self._write()
        self._waiting.append(sample)
        self._bytes += size

    def _size(self, sample: Sample) -> int:
        """Bytes that `sample` adds to a file, at most (names may need escapes in JSON twice over)."""
        width = self.contract.hidden_size
        states = sample.tokens * self._codec.row_bytes(3 * width) + len(sample.final) * self._codec.row_bytes(width)
        names = 8 * len((sample.id + sample.task).encode()) + 16
        return states + sample.tokens * (4 + 1) + len(sample.final_index) * 4 + 8 + names

    def _write(self) -> None:
        samples, self._waiting, self._bytes = self._waiting, [], HEADER_BYTES
        lengths = torch.tensor([0, *(s.tokens for s in samples)])
        offsets = lengths.cumsum(0)
        kept = [s.final_index + int(o) for s, o in zip(samples, offsets[:-1], strict=True)]
        tensors: dict[str, Tensor] = {
            "input_ids": torch.cat([s.input_ids for s in samples]).to(torch.int32),
            "loss_mask": torch.cat([s.loss_mask for s in samples]).to(torch.uint8),
            "sample_offsets": offsets.to(torch.int64),
            "final_index": torch.cat(kept).to(torch.int32),
        }
        tensors |= self._codec.encode("aux", torch.cat([s.aux for s in samples]))
        tensors |= self._codec.encode("final", torch.cat([s.final for s in samples]))
        header = ShardHeader(codec=self._codec.name, ids=[s.id for s in samples], tasks=[s.task for s in samples])
        counts = ShardCounts(
            samples=len(samples),
            tokens=int(offsets[-1]),
            supervised_tokens=int(tensors["loss_mask"].sum()),
            final_states=len(tensors["final_index"]),
        )
        path = self._scratch / shard_name(len(self._written))
        save_file(tensors, path, metadata={METADATA_KEY: header.model_dump_json()})
        self._written.append((path, counts))

    def close(self, out: UnitWriter) -> dict[str, int]:
        """Hand all shards to `out`; totals: samples, tokens, supervised_tokens, final_states, bytes, shards."""
        if self._waiting:
            self._write()
        totals = {name: 0 for name in (*ShardCounts.model_fields, "bytes")}
        for path, counts in self._written:
            size = out.add_file(path.name, path, **counts.model_dump()).size
            path.unlink()
            for name, value in {**counts.model_dump(), "bytes": size}.items():
                totals[name] += value
        return {**totals, "shards": len(self._written)}
