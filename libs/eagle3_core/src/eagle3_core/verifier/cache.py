"""Keys and values of many sequences, each token at the slot of its own position.

Slot = position, prompts padded on the right. What padding, rejected drafts or an earlier occupant of the row left in
a slot lies above every slot that is attended to, and is overwritten before its turn comes, so rows of different
lengths, rows that are refilled and drafts that are rolled back need no bookkeeping at all.

Shapes: B rows of a pass, R rows of the cache, n tokens a row, C slots of capacity, T slots in use, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH_SLOTS = 64


@dataclass
class Placement:
    """Where the tokens of one pass go, and therefore what each of them may attend to."""

    slots_Bn: Tensor
    """Slot (= position) of every token, int64."""
    rows_B: Tensor | None
    """Row of the cache of every row of the pass; None when they are all of them, in order."""
    length: int
    """Slots that the pass reads: its highest slot + 1."""
    _bias: dict[tuple[torch.dtype, int | None], Tensor] = field(default_factory=dict[Any, Tensor])

    @classmethod
    def of(cls, slots_Bn: Tensor, rows_B: Tensor | None = None) -> Placement:
        """The placement at `slots_Bn` (int64)."""
        return cls(slots_Bn, rows_B, int(slots_Bn.max()) + 1)

    def bias(self, dtype: torch.dtype, window: int | None) -> Tensor:
        """[B, 1, n, T] to add to attention scores: 0 where slot <= own slot (and within `window`), else the least value."""
        key = (dtype, window)
        if key not in self._bias:
            slot_T = torch.arange(self.length, device=self.slots_Bn.device)
            own_Bn1 = self.slots_Bn[..., None]
            seen_BnT = slot_T <= own_Bn1
            if window is not None:
                seen_BnT &= slot_T > own_Bn1 - window
            least = torch.finfo(dtype).min
            bias_BnT = torch.zeros(seen_BnT.shape, dtype=dtype, device=slot_T.device).masked_fill_(~seen_BnT, least)
            self._bias[key] = bias_BnT[:, None]
        return self._bias[key]


_placement: ContextVar[Placement] = ContextVar("placement")


@contextmanager
def placed(placement: Placement) -> Generator[None]:
    """Let the cache and the attention of the passes inside know where their tokens stand."""
    token = _placement.set(placement)
    try:
        yield
    finally:
        _placement.reset(token)


def current() -> Placement:
    """The placement of the running pass."""
    return _placement.get()


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: [R, kv heads, C, D], allocated by the first pass."""

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self.rows, self.capacity = rows, capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeros (a weight of zero times garbage might be NaN) in the shape of the first keys and values."""

        def empty(like: Tensor) -> Tensor:
            return like.new_zeros((self.rows, like.shape[1], self.capacity, like.shape[3]))

        self.keys, self.values = empty(key_states), empty(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, kv, n, D] at the pass's slots; return what the pass reads, [B, kv, T, D] each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        place = current()
        rows_B = place.rows_B
        every = torch.arange(key_states.shape[0], device=key_states.device)
        index = (every if rows_B is None else rows_B)[:, None]
        self.keys[index, :, place.slots_Bn] = key_states.transpose(1, 2)
        self.values[index, :, place.slots_Bn] = value_states.transpose(1, 2)
        keys, values = self.keys[:, :, : place.length], self.values[:, :, : place.length]
        return (keys, values) if rows_B is None else (keys[rows_B], values[rows_B])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots that the pass reads, from slot 0."""
        return current().length, 0

    def get_seq_length(self) -> int:
        """0: positions are always given, never counted from here."""
        return 0

    def get_max_length(self) -> int:
        """Slots of capacity."""
        return self.capacity


class SlotCache(Cache):
    """Keys and values of `rows` sequences over all layers; grows by itself when a pass needs more slots."""

    def __init__(self, num_layers: int, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.stack = [SlotLayer(rows, capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.stack))

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer in self.stack:
            layer.rows, layer.capacity = self.rows, self.capacity
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = change(layer.keys), change(layer.values)

    def reserve(self, length: int) -> None:
        """Make room for `length` slots a row, in steps of a quarter so that growing stays cheap."""
        if length <= self.capacity:
            return
        old, self.capacity = self.capacity, max(length, self.capacity + max(GROWTH_SLOTS, self.capacity // 4))

        def grow(states: Tensor) -> Tensor:
            grown = states.new_zeros((*states.shape[:2], self.capacity, states.shape[3]))
            grown[:, :, :old] = states
            return grown

        self._replace(grow)

    def keep(self, rows: Tensor) -> None:
        """Keep only `rows` (int64), in that order."""
        self.rows = len(rows)
        self._replace(lambda states: states[rows])

    def share(self, row: int, length: int) -> None:
        """Give every row the first `length` slots of `row`: a common prompt prefix is computed once."""

        def spread(states: Tensor) -> Tensor:
            states[:, :, :length] = states[row : row + 1, :, :length].clone()
            return states

        self._replace(spread)

    def clone(self) -> SlotCache:
        """A copy that shares nothing."""
        twin = SlotCache(len(self.stack), self.rows, self.capacity)
        for mine, other in zip(self.stack, twin.stack, strict=True):
            if mine.keys is not None and mine.values is not None:
                other.keys, other.values, other.is_initialized = mine.keys.clone(), mine.values.clone(), True
        return twin
