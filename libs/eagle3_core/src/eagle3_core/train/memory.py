"""How much memory training takes, known before it starts: the buffers of a step, added up. No torch.

What stands all the time is a function of the drafter: masters, moments, the products' copy, the verifier's embedding and
head. What a pass adds is a function of its rows (`drafter.rows`): most of it per pair row, kept for the backward pass. So
a pass that would not fit is computed in slices of its chains (`train.slices`): chains share only the keys of step 0, which
each slice computes again. That is this trainer's recomputation; it costs the keys' share of the work once more a slice.

Shapes: N trained weights, T tokens, J key rows, P pair rows, M chains, U labels, K steps, H hidden, A and KV query and
key-value heads x head size, W = A + 2 KV, I inner size, V and Vd vocabularies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.errors import AerieError

HEAD_CHUNK_BYTES = 1 << 29
"""What `drafter.head` makes of logits at once."""
KEY_PARTS_BYTES = 1 << 29
"""The most that the attention's key gradient takes where a group's query heads are shared out among programs."""
STORED_BYTES = 2
"""A stored state's element."""
FLOOR_BYTES = 96 << 20
"""Workspaces of the products, tables, and small tensors."""
USABLE = 0.92
"""Share of a GPU's memory that is planned with: the rest is the driver's, the allocator's and the collectives'."""


class BatchTooSmall(AerieError):
    """A sample does not fit into one forward pass."""

    code, status = "training.batch_tokens", 422


class NoRoom(AerieError):
    """A pass does not fit into the GPU's memory, however it is sliced."""

    code, status = "training.memory", 422


@dataclass(frozen=True)
class Rows:
    """The rows of one pass."""

    tokens: int
    """T; J is counted as T too, and F, the final states, as M."""
    chains: int
    """M."""
    pairs: int
    """P."""

    @classmethod
    def densest(cls, tokens: int, steps: int) -> Rows:
        """Of a pass whose tokens are all the assistant's: nothing of that length takes more."""
        return cls(tokens, tokens, tokens * steps)

    def slice(self, count: int) -> Rows:
        """One of `count` slices of the chains; keys are whole in each."""
        return Rows(self.tokens, -(-self.chains // count), -(-self.pairs // count))


@dataclass(frozen=True)
class Demand:
    """Who trains, and how."""

    config: DrafterConfig
    itemsize: Literal[2, 4]
    """Bytes of an element of the products."""
    train_head: bool
    ranks: int = 1
    sharded: bool = False
    """Whether ranks hold shares (FSDP2)."""
    cuda: bool = True
    """Whether batches are copied to a device ahead of their use."""

    @property
    def _widths(self) -> tuple[int, int, int, int, int]:
        c = self.config
        a, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return c.hidden_size, a, kv, a + 2 * kv, c.intermediate_size

    @property
    def weights(self) -> int:
        """N."""
        h, a, _, w, i = self._widths
        head = self.config.draft_vocab_size * h if self.train_head else 0
        norms = (4 + 3 * self.config.fc_norm) * h
        return 3 * h * h + 2 * h * w + a * h + 3 * h * i + head + norms

    def standing(self) -> int:
        """Bytes that are held all the time."""
        c, h, b, n = self.config, self.config.hidden_size, self.itemsize, self.weights
        copy = b * n if b < 4 else 0
        masters = 12 * n
        if self.sharded and self.ranks > 1:
            masters, copy = 12 * n // self.ranks, b * n
        frozen = 0 if self.train_head else c.draft_vocab_size * h * b
        return masters + copy + frozen + c.vocab_size * h * STORED_BYTES + c.draft_vocab_size * h * b

    def batch(self, rows: Rows) -> int:
        """Bytes of the batch itself, and of the one that is uploaded meanwhile."""
        h = self.config.hidden_size
        once = rows.tokens * (3 * h * STORED_BYTES + 16) + rows.chains * h * STORED_BYTES
        return once * (2 if self.cuda else 1)

    def working(self, rows: Rows, *, slices: int = 1) -> int:
        """Bytes that a pass (or one slice of it) adds at its peak: in the head, or in the backward pass behind it."""
        c, b = self.config, self.itemsize
        h, a, kv, w, i = self._widths
        j, p, m = rows.tokens, rows.pairs, rows.chains
        kept = p * (b * (4 * h + a + w + 3 * i + h * c.norm_output) + 4 * c.num_heads + 12)
        kept += j * b * (3 * h + 3 * h + 4 * kv) + m * b * (h + a)
        tables = 4 * (10 * p + 3 * j + c.ttt_steps * (j + m))
        head_weights = c.draft_vocab_size * h * b * self.train_head
        logits = min(HEAD_CHUNK_BYTES, p * c.draft_vocab_size * b)
        chunk_rows = logits // (c.draft_vocab_size * b)
        head = logits + min(logits, m * c.draft_vocab_size * b) // min(2, c.ttt_steps) + chunk_rows * h * 2 * b
        sent = p * h * b + head_weights
        back = p * (b * (h + a + w) + 8 * kv * (not self.cuda)) + self.weights * b
        step = m * b * (i + h)
        keys = j * b * (4 * kv + 2 * h) + m * b * (a + h) + b * (w * h + 6 * h * h)
        if self.cuda and a > kv:  # a float32 gradient of the keys from each part of a group
            keys += min(8 * j * a, KEY_PARTS_BYTES)
        gradients = 4 * self.weights if slices > 1 else 0
        if self.sharded and self.ranks > 1:
            gradients += 4 * self.weights + 4 * self.weights // self.ranks + b * (2 * w * h + 2 * i * h)
        return kept + tables + gradients + sent + max(head, back + max(step, keys)) + FLOOR_BYTES

    def peak(self, rows: Rows, *, slices: int = 1) -> int:
        """Most bytes in use while a batch of `rows` is trained on, in `slices` slices."""
        return self.standing() + self.batch(rows) + self.working(rows.slice(slices), slices=slices)

    def slices(self, rows: Rows, room: int | None) -> int:
        """The least number of slices with which a pass fits into `room` bytes; 1 where `room` is None. Raises NoRoom."""
        if room is None or self.peak(rows) <= room:
            return 1
        count = 2
        while self.peak(rows, slices=count) > room:
            if count >= rows.chains:
                raise NoRoom(
                    f"a pass of {rows.tokens} tokens needs {gib(self.peak(rows, slices=count)):.1f} GiB even chain by "
                    f"chain, there are {gib(room):.1f} GiB to plan with",
                    remedy="set a smaller training.batch_tokens or training.max_seq_len, or train on a GPU with more "
                    "memory (or on several with training.sharding: fsdp2)",
                    pointer="/training/batch_tokens",
                )
            count = min(rows.chains, math.ceil(count * 1.25))
        return count


def gib(size: float) -> float:
    """Bytes as GiB."""
    return size / 2**30


def require_whole_samples(batch_tokens: int, longest: int) -> None:
    """Raise BatchTooSmall where a pass of `batch_tokens` could not hold a sample of `longest` tokens, the most that one may
    have: the first such sample would end the training, when all states have been captured."""
    if longest > batch_tokens:
        raise BatchTooSmall(
            f"samples may have {longest} tokens, training.batch_tokens is {batch_tokens}, and a pass takes whole samples",
            remedy=f"set training.max_seq_len to {batch_tokens}, which cuts only what is longer in training, or raise "
            f"training.batch_tokens to {longest}",
            pointer="/training/batch_tokens",
        )
