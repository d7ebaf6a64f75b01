"""Shards -> packed batches: the order of everything is a pure function of (seed, epoch).

So a cursor of two numbers (epoch, group) is all that an exact resume needs. Samples are packed end to end in the
epoch's order until the next one no longer fits; samples without any chain that a loss reads are left out, and said.
Held-out samples are chosen by the hash of their number, so they stay the same when epochs, seed or order change.

The samples of an optimizer step (a group of passes) do not depend on the number of ranks. Several ranks share them so
that each computes about as much (`train.cost`): the heaviest sample first, each to the rank with the least so far.

Shapes: T tokens of a sample or batch, S samples, K steps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from eagle3_core.data.split import held_out
from eagle3_core.drafter.chains import LabelRule, plan_chains, valid_steps
from eagle3_core.drafter.rows import lay_out
from eagle3_core.drafter.step import PackedBatch
from eagle3_core.errors import AerieError
from eagle3_core.train.cost import EVEN, Facts, Weights
from eagle3_core.train.deal import dealt
from eagle3_core.train.memory import BatchTooSmall, Rows
from eagle3_core.verifier.contract import CaptureContract

Pass = tuple[int, ...]
"""Numbers of the samples of one forward pass; empty where a rank has nothing to do while others do."""
Group = tuple[Pass, ...]
"""The forward passes of one optimizer step."""


class NoSupervision(AerieError):
    """No sample has a token that the drafter could learn from."""

    code, status = "training.no_supervision", 422


class MissingFinalState(AerieError):
    """A shard lacks a final state that the label rule reads."""

    code, status = "shards.final_missing", 422


class LoadedSample(Protocol):
    """What training reads of a sample with its states."""

    @property
    def input_ids(self) -> Tensor:
        """i32 [T]."""
        ...

    @property
    def aux(self) -> Tensor:
        """[T, 3H]."""
        ...

    @property
    def final(self) -> Tensor:
        """[M, H]."""
        ...

    @property
    def final_index(self) -> Tensor:
        """i32 [M]: positions of `final`'s rows."""
        ...


class Samples(Protocol):
    """Random access to samples; `shards.reader.ShardSet` is one."""

    @property
    def contract(self) -> CaptureContract:
        """How their states were captured."""
        ...

    def __len__(self) -> int: ...

    def loss_mask(self, index: int) -> Tensor:
        """u8 [T], without reading a state."""
        ...

    def sample(self, index: int) -> LoadedSample:
        """The sample with its states."""
        ...


class Feed:
    """The batches of every epoch, and of the held-out samples."""

    def __init__(
        self, samples: Samples, *, steps: int, rule: LabelRule, batch_tokens: int, seed: int,
        val_ratio: float = 0.0, max_seq_len: int | None = None, weights: Weights = EVEN,
    ) -> None:  # fmt: skip
        """Reads every mask once. `weights` is what a sample's parts cost. Raises NoSupervision, BatchTooSmall."""
        self._samples, self._steps = samples, steps
        self._rule: LabelRule = rule
        self._batch_tokens, self._seed, self._cut, self._weights = batch_tokens, seed, max_seq_len, weights
        self._facts = [self._look(i) for i in range(len(samples))]
        usable = [i for i, facts in enumerate(self._facts) if facts.supervised]
        if not usable:
            raise _nothing_to_learn(samples, max_seq_len)
        self._require_room(usable)
        held = [i for i in usable if held_out(i, val_ratio)]
        self.held_out: list[int] = held if len(held) < len(usable) else []
        """Samples that only validation reads, in order."""
        chosen = set(self.held_out)
        self.train: list[int] = [i for i in usable if i not in chosen]
        """Samples that are trained on, in order."""
        self.dropped = len(samples) - len(usable)
        """Samples without anything to learn."""

    @property
    def supervised_tokens(self) -> int:
        """Tokens that chains of one epoch draft at their first step."""
        return sum(self._facts[i].supervised for i in self.train)

    def batches(self, epoch: int) -> list[Pass]:
        """The samples of each batch of `epoch`, from 0."""
        order = sorted(self.train, key=lambda i: blake3(f"{self._seed}/{epoch}/{i}".encode()).digest())
        return self._packed(order)

    def groups(self, epoch: int, passes: int) -> list[Group]:
        """The batches of `epoch` in optimizer steps of `passes`; the epoch's last step may have fewer."""
        return _grouped(self.batches(epoch), passes)

    def validation_groups(self, passes: int = 1) -> list[Group]:
        """The held-out samples' batches, `passes` at a time; always the same samples."""
        return _grouped(self._packed(self.held_out), passes)

    def shared(self, group: Group, ranks: int) -> list[list[Pass]]:
        """The passes of each rank, as many for each; empty ones where there are fewer samples.

        What is shared evenly is work, not tokens: with several ranks a pass may hold more than `batch_tokens`.
        """
        if ranks == 1:
            return [list(group)]
        order = [i for batch in group for i in batch]
        own = dealt(order, ranks, self._work)
        per_rank = -(-len(group) // ranks)
        return [[tuple(part) for part in dealt(samples, per_rank, self._work)] for samples in own]

    def supervised_in(self, samples: Sequence[int]) -> int:
        """Tokens that chains of `samples` draft at their first step."""
        return sum(self._facts[i].supervised for i in samples)

    def tokens_in(self, samples: Sequence[int]) -> int:
        """Tokens of `samples`."""
        return sum(self._facts[i].tokens for i in samples)

    def rows_of(self, batch: Pass) -> Rows:
        """The rows that a pass over `batch` has."""
        facts = [self._facts[i] for i in batch]
        return Rows(sum(f.tokens for f in facts), sum(f.supervised for f in facts), sum(f.pairs for f in facts))

    def load(self, batch: Sequence[int], *, pinned: bool = False) -> PackedBatch:
        """The samples `batch` end to end, with their plan and the rows of its work. Raises what the shards raise, MissingFinalState.

        `pinned`: states are laid straight into memory that a GPU reads by itself.
        """
        ids: list[Tensor] = []
        masks: list[np.ndarray] = []
        aux: list[Tensor] = []
        final: list[Tensor] = []
        rows: list[Tensor] = []
        kept = 0
        for i in batch:
            sample, tokens = self._samples.sample(i), self._facts[i].tokens
            ids.append(sample.input_ids[:tokens].long())
            masks.append(self._samples.loss_mask(i)[:tokens].numpy())
            aux.append(sample.aux[:tokens])
            final.append(sample.final)
            row_T = torch.full((len(sample.input_ids),), -1, dtype=torch.long)
            row_T[sample.final_index.long()] = torch.arange(kept, kept + len(sample.final))
            rows.append(row_T[:tokens])
            kept += len(sample.final)
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in ids])]).astype(np.int64)
        plan = plan_chains(np.concatenate(masks), offsets, self._steps, self._rule)
        packed = PackedBatch(
            torch.cat(ids), offsets, _joined(aux, pinned), _joined(final, pinned), torch.cat(rows), plan, tuple(batch),
            lay_out(plan, offsets),
        )  # fmt: skip
        _require_states(packed)
        return packed

    def _look(self, index: int) -> Facts:
        mask_T = self._samples.loss_mask(index).numpy()[: self._cut]
        valid_TK = valid_steps(mask_T, np.array([0, len(mask_T)]), self._steps, self._rule)
        starts = np.flatnonzero(valid_TK.any(1))
        depth_M = self._steps - np.argmax(valid_TK[starts, ::-1], axis=1) if len(starts) else starts
        return Facts(len(mask_T), len(starts), int(depth_M.sum()), int((depth_M * (starts + 1)).sum()))

    def _work(self, index: int) -> float:
        return self._weights.operations(self._facts[index])

    def _require_room(self, usable: list[int]) -> None:
        longest = max(usable, key=lambda i: self._facts[i].tokens)
        if (tokens := self._facts[longest].tokens) > self._batch_tokens:
            raise BatchTooSmall(
                f"sample {longest} has {tokens} tokens, training.batch_tokens is {self._batch_tokens}",
                remedy=f"raise training.batch_tokens to {tokens}, or set training.max_seq_len to {self._batch_tokens} "
                "to cut longer samples",
                pointer="/training/batch_tokens",
            )

    def _packed(self, order: Sequence[int]) -> list[Pass]:
        batches: list[Pass] = []
        current: list[int] = []
        room = self._batch_tokens
        for i in order:
            if current and self._facts[i].tokens > room:
                batches.append(tuple(current))
                current, room = [], self._batch_tokens
            current.append(i)
            room -= self._facts[i].tokens
        return [*batches, tuple(current)] if current else batches


def _nothing_to_learn(samples: Samples, cut: int | None) -> NoSupervision:
    """Why no sample has a chain: the answers are empty, or the mask or the cut leaves them out."""
    none = f"none of {len(samples)} samples has two supervised tokens in a row"
    masks = [samples.loss_mask(i).numpy() != 0 for i in range(len(samples))]
    answers = sum(int(mask_T.any()) for mask_T in masks)
    if answers and not any((mask_T[1:] & mask_T[:-1]).any() for mask_T in masks):
        return NoSupervision(
            f"{none}: every answer is empty, the token that ends it and nothing before ({answers} samples have such answers)",
            remedy="ask the verifier one of the prompts with its chat template: it ends its answers at once, or a token "
            "that begins them counts as an end (eos_token_id); with data.regenerate.max_new_tokens 1 raise that",
        )
    return NoSupervision(
        none + (f" within its first {cut} tokens" if cut else ""),
        remedy="check the chat template's mask, or raise training.max_seq_len if answers begin behind it",
    )


def _joined(parts: Sequence[Tensor], pinned: bool) -> Tensor:
    """Rows [n_i, C] on top of one another."""
    if not pinned:
        return torch.cat(list(parts))
    whole = torch.empty(sum(map(len, parts)), parts[0].shape[1], dtype=parts[0].dtype, pin_memory=True)
    return torch.cat(list(parts), out=whole)


def _grouped(batches: Sequence[Pass], size: int) -> list[Group]:
    return [tuple(batches[i : i + size]) for i in range(0, len(batches), size)]


def _require_states(batch: PackedBatch) -> None:
    plan = batch.plan
    label_MK = plan.start_M[:, None] + 1 + np.arange(plan.valid_MK.shape[1])
    absent = batch.final_row_T.numpy()[label_MK[plan.valid_MK]] < 0
    if absent.any():
        position = int(label_MK[plan.valid_MK][absent][0])
        document = int(np.searchsorted(batch.offsets, position, side="right")) - 1
        raise MissingFinalState(
            f"sample {batch.samples[document]} holds no final state at position {position - batch.offsets[document]}, "
            "where a label is read",
            remedy="extract the states again with this version",
        )
