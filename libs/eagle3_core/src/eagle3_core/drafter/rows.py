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


def lay_out(plan: ChainPlan, offsets: NDArray[Any]) -> RowLayout:
    """The rows of a packed batch with document bounds `offsets` [S+1]."""
    steps, starts = plan.valid_MK.shape[1], np.asarray(offsets[:-1], dtype=np.int64)
    order_M = np.argsort(-plan.depth_M, kind="stable")
    document_M = np.repeat(np.arange(len(starts)), np.diff(plan.row_offsets))[order_M]
    start_M, depth_M, valid_MK = plan.start_M[order_M], plan.depth_M[order_M], plan.valid_MK[order_M]
    # Step k reads the token behind key row p + k, so the rows of a document end with the last one read.
    stops = plan.key_stops.copy()
    np.maximum.at(stops, document_M, start_M + depth_M)
    lengths = stops - starts
    key_offsets = np.concatenate([[0], np.cumsum(lengths)])
    local_J = np.arange(key_offsets[-1]) - np.repeat(key_offsets[:-1], lengths)
    key_J = local_J + np.repeat(starts, lengths)
    shift_M = (key_offsets[:-1] - starts)[document_M]

    counts = [int((depth_M > k).sum()) for k in range(steps)]
    first_row = np.concatenate([[0], np.cumsum(counts)])
    row_M, first_M, local_M = start_M + shift_M, key_offsets[:-1][document_M], start_M - starts[document_M]
    # A chain's step k and the token that it reads name one another, so all that is sorted by token is found by scatter.
    pair_KJ, learns_KJ = np.full((steps, len(key_J)), -1, dtype=np.int32), np.zeros((steps, len(key_J)), dtype=bool)
    for k, n in enumerate(counts):
        pair_KJ[k, row_M[:n] + k] = np.arange(first_row[k], first_row[k + 1])
        learns_KJ[k, row_M[:n] + k] = valid_MK[:n, k]

    def by_pair(of_M: Ints, forward: int = 0) -> Ints:
        """[P]: what each chain has, plus `forward` a step."""
        return np.concatenate([of_M[:n] + forward * k for k, n in enumerate(counts)])

    token_E, query_J = _numbered(np.asarray((pair_KJ >= 0).any(0)))
    row_U, label_J = _numbered(np.asarray(learns_KJ.any(0)))
    row_R, step_R = np.nonzero(np.ascontiguousarray(learns_KJ.T))
    pair_R, token_P = pair_KJ[step_R, row_R], by_pair(row_M, 1)
    text_J = np.where(key_J + 2 < np.repeat(np.asarray(offsets[1:]), lengths), key_J + 2, -1)
    tables: dict[str, NDArray[Any]] = {
        "position_J": key_J,
        "rotation_J": local_J + 1,
        "start_P": by_pair(row_M),
        "first_P": by_pair(first_M),
        "rotation_P": by_pair(local_M + 1, 1),
        "token_P": token_P,
        "token_E": token_E,
        "query_P": query_J[token_P],
        "key_pair_KJ": np.concatenate([np.full((1, len(key_J)), -1, dtype=np.int32), pair_KJ[1:]]),
        "query_pair_KE": pair_KJ[:, token_E],
        "offset_K": first_row[:-1],
        # Learning rows: their pair row, place in [M, K], label, and the token that the text has.
        "pair_R": pair_R,
        "entry_R": (pair_R - first_row[step_R]) * steps + step_R,
        "label_R": label_J[row_R],
        "text_R": text_J[row_R],
        "position_U": key_J[row_U] + 1,
        "valid_MK": valid_MK,
    }
    chains_of, key_range_of = list[Ints](), list[tuple[int, int]]()
    for document in np.flatnonzero(np.diff(plan.row_offsets)):
        chains = np.flatnonzero(document_M == document)
        first = int(key_offsets[document])
        chains_of.append(chains)
        key_range_of.append((first, int(start_M[chains].max() - starts[document]) + 1 + first))
    label_ends = np.cumsum(learns_KJ.sum(0)[row_U])
    return RowLayout(
        steps, len(key_J), bool((key_J == np.arange(len(key_J))).all()), tuple(counts), tuple(int(x) for x in first_row),
        int(lengths.max(initial=0)) + 1, len(label_ends), label_ends, tuple(chains_of), tuple(key_range_of),
        {name: np.ascontiguousarray(table, dtype=np.int32).reshape(-1) for name, table in tables.items()},
    )  # fmt: skip


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
