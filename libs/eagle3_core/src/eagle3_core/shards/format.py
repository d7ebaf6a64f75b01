"""A shard: packed samples of tokens and hidden states in one safetensors file.

    input_ids i32 [N], loss_mask u8 [N]    N tokens over S samples, unshifted
    sample_offsets i64 [S + 1]             sample s covers [offsets[s], offsets[s + 1])
    aux [N, 3H]                            inputs of three layers, side by side
    final [M, H], final_index i32 [M]      input of the final norm, at M of the N positions

The drafter's label at a position needs the final state there, but most positions are prompt and nobody's label. So
`final` is kept only where some label rule could read it: p with mask[p-1], mask[p] or mask[p+1]. At 30 % supervised
tokens this saves a sixth of a shard.

Ids and tasks of the samples, codec and schema version travel as one metadata entry: safetensors writes several entries
in an order that changes from process to process, and a shard's bytes must be a pure function of its content.

Shapes: N tokens of a shard, S samples, M kept final states, T tokens of one sample, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_core.errors import AerieError
from eagle3_core.verifier.base import require_finite
from eagle3_core.verifier.contract import CaptureContract


class SampleRefused(AerieError):
    """A sample cannot be stored: its parts do not fit one another."""

    code, status = "shards.sample", 422


@dataclass(frozen=True)
class Sample:
    """One sample with its states, as training gets it."""

    id: str
    task: str
    input_ids: Tensor
    """i32 [T]"""
    loss_mask: Tensor
    """u8 [T]: 1 on the assistant's tokens."""
    aux: Tensor
    """[T, 3H], as stored."""
    final: Tensor
    """[M, H], as stored."""
    final_index: Tensor
    """i32 [M], strictly increasing: position within the sample of each row of `final`."""

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.input_ids)


def kept_positions(loss_mask_T: Tensor) -> Tensor:
    """i32 [M], increasing: positions p of one sample with mask[p-1], mask[p] or mask[p+1]."""
    on = loss_mask_T.bool()
    kept = on.clone()
    kept[1:] |= on[:-1]
    kept[:-1] |= on[1:]
    return kept.nonzero().flatten().to(torch.int32)


def check_sample(sample: Sample, contract: CaptureContract) -> None:
    """Raise SampleRefused or StatesNotFinite, naming the sample, unless it is whole and fits `contract`."""
    tokens, width = sample.tokens, contract.hidden_size
    index = sample.final_index
    faults = [
        (tokens == 0, "it has no tokens"),
        (sample.loss_mask.shape != (tokens,), f"{tokens} tokens, a mask of shape {list(sample.loss_mask.shape)}"),
        (sample.aux.shape != (tokens, 3 * width), f"aux is {list(sample.aux.shape)}, not [{tokens}, {3 * width}]"),
        (
            sample.final.shape != (len(index), width),
            f"final is {list(sample.final.shape)}, not [{len(index)}, {width}]",
        ),
    ]
    if not any(bad for bad, _ in faults):
        faults += [
            (not bool((sample.loss_mask <= 1).all()), "its mask holds values other than 0 and 1"),
            (
                not 0 <= int(sample.input_ids.min()) <= int(sample.input_ids.max()) < contract.vocab_size,
                f"a token is outside 0..{contract.vocab_size - 1}",
            ),
            (
                len(index) > 0
                and not (int(index[0]) >= 0 and int(index[-1]) < tokens and bool((index.diff() > 0).all())),
                f"final_index does not rise within 0..{tokens - 1}",
            ),
        ]
    for bad, what in faults:
        if bad:
            raise SampleRefused(f"sample {sample.id}: {what}", remedy="capture it again", sample=sample.id)
    require_finite(sample.id, sample.aux, sample.final, contract.aux_layers)
