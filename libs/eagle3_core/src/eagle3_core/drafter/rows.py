"""Where each row of a batch's work lies: the index tables that the step's products and kernels share.

Three kinds of rows exist. A *key row* is a position of a document, up to the last token that one of its chains reads; it
gets `fc`, step-0 keys and values and its token's share of the projections. A *pair row* (p, k) is one step of one chain;
queries, MLP and everything later exist only there. A *learning row* is a pair that counts; head and loss exist only there.

Chains are sorted by depth, the deepest first, so the chains alive in step k are the first N_k of them and chain m is the
same row of every step: pair row (m, k) = offsets[k] + m. Learning rows are sorted by the label they learn from, so that
up to K of them share one row of the verifier's head.

Built with numpy from a `ChainPlan`, no tensor touched: a loader's thread can do it beside the compute.

Shapes: J key rows, M chains, N_k chains alive in step k, P pair rows, K steps, R learning rows, U labels, E tokens that a
query reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle3_core.drafter.chains import ChainPlan, Ints

Int32s = NDArray[np.int32]


@dataclass(frozen=True)
class RowLayout:
    """The rows of one batch."""

    steps: int
    keys: int
    """J."""
    is_prefix: bool
    """Whether the key rows are the packed positions 0 to J-1."""
    counts: tuple[int, ...]
    """[K]: N_k."""
    offsets: tuple[int, ...]
    """[K+1]: first pair row of each step; the last one is P."""
    reach: int
    """1 + the largest position that is rotated to."""
    labels: int
    """U."""
    learning_ends: Ints
    """[U]: learning rows up to and with each label's."""
    chains_of: tuple[Ints, ...]
    """Per document: its chains (numbers in this order), ascending; documents without any are left out."""
    key_range_of: tuple[tuple[int, int], ...]
    """Per document of `chains_of`: its first key row, and the one behind the last a chain of it looks back to."""
    host: Mapping[str, Int32s]
    """The tables by name, for `Tables`."""

    @property
    def pairs(self) -> int:
        """P."""
        return self.offsets[-1]

    @property
    def learning(self) -> int:
        """R."""
        return int(self.learning_ends[-1]) if self.labels else 0

    def rows(self, k: int, count: int | None = None) -> slice:
        """Pair rows of step `k`, or of its first `count` chains."""
        first = self.offsets[k]
        return slice(first, first + (self.counts[k] if count is None else count))

    def label_chunks(self, most: int) -> list[tuple[slice, slice]]:
        """(labels, learning rows) in pieces of about `most` learning rows, whole labels each."""
        pieces: list[tuple[slice, slice]] = []
        label, row = 0, 0
        while label < self.labels:
            stop = max(label + 1, int(np.searchsorted(self.learning_ends, row + most, side="right")))
            end = int(self.learning_ends[stop - 1])
            pieces.append((slice(label, stop), slice(row, end)))
            label, row = stop, end
        return pieces


@dataclass(frozen=True)
class _Chains:
    """The chains of a batch in the layout's order, the deepest first."""

    document_M: Ints
    start_M: Ints
    """Position in the batch."""
    depth_M: Ints
    valid_MK: NDArray[Any]
    counts: list[int]
    """[K]: N_k."""

    @classmethod
    def of(cls, plan: ChainPlan) -> _Chains:
        order_M = np.argsort(-plan.depth_M, kind="stable")
        document_M = np.repeat(np.arange(len(plan.row_offsets) - 1), np.diff(plan.row_offsets))
        counts = [int((plan.depth_M > k).sum()) for k in range(plan.valid_MK.shape[1])]
        return cls(document_M[order_M], plan.start_M[order_M], plan.depth_M[order_M], plan.valid_MK[order_M], counts)

    def by_pair(self, of_M: Ints, forward: int = 0) -> Ints:
        """[P]: what each chain has, plus `forward` a step."""
        return np.concatenate([of_M[:n] + forward * k for k, n in enumerate(self.counts)])


@dataclass(frozen=True)
class _Keys:
    """The key rows of a batch, document after document."""

    offsets: Ints
    """[S+1]: first key row of each document."""
    local_J: Ints
    """Position in the document."""
    position_J: Ints
    """Position in the batch."""
    text_J: Ints
    """Position of the token after the next; -1 behind the document's end."""

    @classmethod
    def of(cls, plan: ChainPlan, chains: _Chains, bounds: Ints) -> _Keys:
        # Step k reads the token behind key row p + k, so the rows of a document end with the last one read.
        stops = plan.key_stops.copy()
        np.maximum.at(stops, chains.document_M, chains.start_M + chains.depth_M)
        lengths = stops - bounds[:-1]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        local_J = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        position_J = local_J + np.repeat(bounds[:-1], lengths)
        text_J = np.where(position_J + 2 < np.repeat(bounds[1:], lengths), position_J + 2, -1)
        return cls(offsets, local_J, position_J, text_J)

    def __len__(self) -> int:
        return len(self.local_J)


def lay_out(plan: ChainPlan, offsets: NDArray[Any]) -> RowLayout:
    """The rows of a packed batch with document bounds `offsets` [S+1]."""
    bounds = np.asarray(offsets, dtype=np.int64)
    chains = _Chains.of(plan)
    keys = _Keys.of(plan, chains, bounds)
    first_row = np.concatenate([[0], np.cumsum(chains.counts)])
    first_M, local_M = keys.offsets[:-1][chains.document_M], chains.start_M - bounds[:-1][chains.document_M]
    row_M = first_M + local_M
    # A chain's step k and the token that it reads name one another, so all that is sorted by token is found by scatter.
    pair_KJ = np.full((len(chains.counts), len(keys)), -1, dtype=np.int32)
    learns_KJ = np.zeros(pair_KJ.shape, dtype=bool)
    for k, n in enumerate(chains.counts):
        pair_KJ[k, row_M[:n] + k] = np.arange(first_row[k], first_row[k + 1])
        learns_KJ[k, row_M[:n] + k] = chains.valid_MK[:n, k]
    token_E, query_J = _numbered(np.asarray((pair_KJ >= 0).any(0)))
    token_P = chains.by_pair(row_M, 1)
    tables: dict[str, NDArray[Any]] = {
        "position_J": keys.position_J,
        "rotation_J": keys.local_J + 1,
        "start_P": chains.by_pair(row_M),
        "first_P": chains.by_pair(first_M),
        "rotation_P": chains.by_pair(local_M + 1, 1),
        "token_P": token_P,
        "token_E": token_E,
        "query_P": query_J[token_P],
        "key_pair_KJ": np.concatenate([np.full((1, len(keys)), -1, dtype=np.int32), pair_KJ[1:]]),
        "query_pair_KE": pair_KJ[:, token_E],
        "offset_K1": first_row,
        **_learning_tables(keys, pair_KJ, learns_KJ, first_row),
        "valid_MK": chains.valid_MK,
    }
    label_ends = np.cumsum(learns_KJ.sum(0)[learns_KJ.any(0)])
    chains_of, key_range_of = _by_document(plan, chains.document_M, row_M, keys.offsets)
    return RowLayout(
        steps=len(chains.counts), keys=len(keys), is_prefix=bool((keys.position_J == np.arange(len(keys))).all()),
        counts=tuple(chains.counts), offsets=tuple(int(x) for x in first_row),
        reach=int(np.diff(keys.offsets).max(initial=0)) + 1, labels=len(label_ends), learning_ends=label_ends,
        chains_of=chains_of, key_range_of=key_range_of,
        host={name: np.ascontiguousarray(table, dtype=np.int32).reshape(-1) for name, table in tables.items()},
    )  # fmt: skip


def _learning_tables(
    keys: _Keys, pair_KJ: NDArray[Any], learns_KJ: NDArray[Any], first_row: Ints
) -> dict[str, NDArray[Any]]:
    """Of each learning row its pair row, place in [M, K], label, and the token that the text has; of each label its position."""
    row_U, label_J = _numbered(np.asarray(learns_KJ.any(0)))
    row_R, step_R = np.nonzero(np.ascontiguousarray(learns_KJ.T))
    pair_R = pair_KJ[step_R, row_R]
    return {
        "pair_R": pair_R,
        "entry_R": (pair_R - first_row[step_R]) * len(pair_KJ) + step_R,
        "label_R": label_J[row_R],
        "text_R": keys.text_J[row_R],
        "position_U": keys.position_J[row_U] + 1,
    }


def _by_document(
    plan: ChainPlan, document_M: Ints, row_M: Ints, first_keys: Ints
) -> tuple[tuple[Ints, ...], tuple[tuple[int, int], ...]]:
    """`chains_of` and `key_range_of` of a layout."""
    chains_of, key_range_of = list[Ints](), list[tuple[int, int]]()
    for document in np.flatnonzero(np.diff(plan.row_offsets)):
        chains = np.flatnonzero(document_M == document)
        chains_of.append(chains)
        key_range_of.append((int(first_keys[document]), int(row_M[chains].max()) + 1))
    return tuple(chains_of), tuple(key_range_of)


def _numbered(chosen: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """(the chosen rows, and for each of all rows its number among them)."""
    return np.flatnonzero(chosen), np.cumsum(chosen) - 1


class Tables:
    """A layout's tables on a device: one upload, views by name. int64 on the CPU, int32 on a GPU."""

    def __init__(self, layout: RowLayout, device: torch.device) -> None:
        flat = torch.from_numpy(np.concatenate([table for table in layout.host.values()]))
        self._pinned = flat.pin_memory() if device.type == "cuda" else flat.long()
        # The pinned copy is kept until this object goes: the upload runs beside the host.
        parts = self._pinned.to(device, non_blocking=True).split([len(table) for table in layout.host.values()])
        self._parts = dict(zip(layout.host, parts, strict=True))

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name]
