"""Which positions of a packed batch the drafter is run on, and where each of its steps learns.

A chain starts at p when serving can start one there: the verifier has written x_{p+1} itself, so x_{p+1} and what
follows are the assistant's. Step k of that chain reads x_{p+1+k} and drafts x_{p+2+k}; under the `serving` rule it
counts iff mask[p+1 .. p+2+k] are all 1, in one document. The peers' rules read one bit of the mask, inside one document:
`speculators` (also Automodel's and ModelOpt's) the token that is read, mask[p+1+k]; `specforge` (also EAGLE's own,
TorchSpec's and AngelSlim's) the token before it, mask[p+k].

Beyond step 0 no position reads another one's output. So positions no loss reads need their step-0 keys and values and
nothing more, and positions behind a document's last chain need nothing at all.

Shapes: T tokens of the batch, S documents, M chain starts, K steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

LabelRule = Literal["serving", "speculators", "specforge"]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class ChainPlan:
    """Chain starts of a packed batch, in order of position."""

    start_M: Ints
    """Packed index p of each chain's state; its step k learns from the verifier's state at p + 1 + k."""
    valid_MK: Bools
    """Whether step k of the chain counts."""
    depth_M: Ints
    """Steps that must be computed: 1 + the last valid one."""
    row_offsets: Ints
    """[S+1]: chains `row_offsets[s]` to `row_offsets[s+1]` start in document s."""
    key_stops: Ints
    """[S]: packed index behind the document's last chain start: keys are needed up to here (its start if it has none)."""

    @property
    def pairs(self) -> int:
        """Valid (chain, step) pairs: the terms of the loss."""
        return int(self.valid_MK.sum())


def valid_steps(mask_T: NDArray[Any], offsets: NDArray[Any], steps: int, rule: LabelRule) -> Bools:
    """bool [T, K]: whether step k of the chain that starts at p counts. `offsets`: i64 [S+1] document bounds."""
    mask = np.asarray(mask_T).astype(bool)
    total = len(mask)
    end_T = np.repeat(np.asarray(offsets[1:], dtype=np.int64), np.diff(offsets))
    ahead = np.arange(total)
    valid_TK = np.zeros((total, steps), dtype=bool)
    alive = _shifted(mask, 1) & (ahead + 1 < end_T)
    for k in range(steps):
        if rule == "serving":
            alive = alive & _shifted(mask, k + 2) & (ahead + k + 2 < end_T)
            valid_TK[:, k] = alive
        else:
            valid_TK[:, k] = _shifted(mask, k + (rule == "speculators")) & (ahead + k + 1 < end_T)
    return valid_TK


def _shifted(mask: Bools, by: int) -> Bools:
    """mask[p + by] at p, false beyond the end."""
    out = np.zeros_like(mask)
    if by < len(mask):
        out[: len(mask) - by] = mask[by:]
    return out


def plan_chains(mask_T: NDArray[Any], offsets: NDArray[Any], steps: int, rule: LabelRule) -> ChainPlan:
    """The plan of a packed batch: u8 or bool mask [T], document bounds [S+1], `steps` K."""
    valid_TK = valid_steps(mask_T, offsets, steps, rule)
    start_M = np.flatnonzero(valid_TK.any(1)).astype(np.int64)
    valid_MK = valid_TK[start_M]
    depth_M = steps - np.argmax(valid_MK[:, ::-1], axis=1) if len(start_M) else np.zeros(0, dtype=np.int64)
    row_offsets = np.searchsorted(start_M, offsets).astype(np.int64)
    last = start_M[np.maximum(row_offsets[1:] - 1, 0)] if len(start_M) else np.zeros(len(offsets) - 1, dtype=np.int64)
    key_stops = np.where(np.diff(row_offsets) > 0, last + 1, np.asarray(offsets[:-1])).astype(np.int64)
    return ChainPlan(start_M, valid_MK, depth_M.astype(np.int64), row_offsets, key_stops)
