"""The step's operations on a GPU: thin launches of the Triton kernels.

Shapes as in `drafter.operations`.
"""

# Triton takes launch options (num_warps, num_stages) and compile-time values that its types do not know.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
from torch import Tensor

from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.kernels import rowwise, scoring
from eagle3_core.drafter.kernels.attention import TritonAttention
from eagle3_core.drafter.kernels.tiles import TileSizes, tile_sizes
from eagle3_core.drafter.losses import LossName
from eagle3_core.drafter.operations import Attention, Scores
from eagle3_core.drafter.plain import PlainOperations, row_coefficients
from eagle3_core.drafter.plain_attention import PlainAttention
from eagle3_core.drafter.rows import RowLayout, Tables

GATE_BLOCK, GATHER_BLOCK, FOLD_ROWS, FOLD_BLOCK, SCALE_BLOCK = 2048, 1024, 64, 512, 4096
SCORE_BLOCK, SCORE_WARPS = 2048, 4
"""Of seven shapes on an H200 the fastest: 0.50 ms for 8,190 x 32,000 logits, against 0.77 at 4096 and 8 warps."""


class TritonOperations:
    """`operations.Operations` in Triton."""

    def __init__(self, config: DrafterConfig, device: torch.device, sizes: TileSizes | None = None) -> None:
        """`sizes` of the attention's tiles are those that fit `device` unless given."""
        self._config, self._device, self._sizes = config, device, sizes
        self._plain = PlainOperations(config)
        self._block = triton.next_power_of_2(config.hidden_size)
        # Programs of the norms' backward: two a multiprocessor, each with its own sums.
        self._programs = (
            2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
        )

    def norm(
        self, x: Tensor, gain_H: Tensor | None, eps: float, out: Tensor, rstd: Tensor, *, add: Tensor | None = None,
        rows: Tensor | None = None, total: Tensor | None = None,
    ) -> None:  # fmt: skip
        """See `Operations.norm`."""
        count = len(out) if total is None else len(total)
        if count:
            rowwise.norm_kernel[(count,)](
                x, x if add is None else add, x if rows is None else rows, x if gain_H is None else gain_H,
                x if total is None else total, out, rstd, len(out), out.shape[1], eps, HAS_Y=add is not None,
                HAS_IDX=rows is not None, HAS_GAIN=gain_H is not None, KEEP=total is not None, B=self._block, num_warps=8,
            )  # fmt: skip

    def norm_backward(
        self, d: Tensor, x: Tensor, rstd: Tensor, gain_H: Tensor, out: Tensor, d_gain: Tensor, *,
        rows: Tensor | None = None, residual: Tensor | None = None, accumulate: bool = False,
    ) -> None:  # fmt: skip
        """See `Operations.norm_backward`."""
        if len(d):
            rowwise.norm_backward_kernel[(min(len(d), len(d_gain)),)](
                d, x, d if rows is None else rows, rstd, gain_H, d if residual is None else residual, out, d_gain,
                len(d), d.shape[1], HAS_IDX=rows is not None, HAS_RES=residual is not None, ADD=accumulate,
                B=self._block, num_warps=8,
            )  # fmt: skip

    def gain_sums(self, hidden: int) -> Tensor:
        """See `Operations.gain_sums`."""
        return torch.zeros(self._programs, hidden, device=self._device)

    def rotate(
        self, x: Tensor, positions: Tensor, heads: int, rotated: int, tables: tuple[Tensor, Tensor], *,
        add: Tensor | None = None, rows: Tensor | None = None, inverse: bool = False,
    ) -> None:  # fmt: skip
        """See `Operations.rotate`."""
        together, half = min(16, heads & -heads), self._config.head_dim // 2
        if half & (half - 1):  # no block of that size exists
            self._plain.rotate(x, positions, heads, rotated, tables, add=add, rows=rows, inverse=inverse)
        elif len(x):
            rowwise.rotate_kernel[(len(x), heads // together)](
                x, x.stride(0), x if add is None else add, 0 if add is None else add.stride(0),
                positions if rows is None else rows, positions, *tables, -1.0 if inverse else 1.0, rotated,
                HAS_E=add is not None, HAS_IDX=rows is not None, HEADS=together, D2=half, num_warps=4,
            )  # fmt: skip

    def gate(self, gate_up_n2I: Tensor, out_nI: Tensor) -> None:
        """See `Operations.gate`."""
        self._gate(gate_up_n2I, out_nI, backward=False)

    def gate_backward(self, gate_up_n2I: Tensor, d_out_nI: Tensor) -> None:
        """See `Operations.gate_backward`."""
        self._gate(gate_up_n2I, d_out_nI, backward=True)

    def _gate(self, gate_up_n2I: Tensor, out_nI: Tensor, *, backward: bool) -> None:
        count, inner = out_nI.shape
        rowwise.gate_kernel[(count, triton.cdiv(inner, GATE_BLOCK))](
            gate_up_n2I, out_nI, inner, ACT=self._config.hidden_act, BACKWARD=backward, B=GATE_BLOCK, num_warps=8
        )

    def fold(self, matrix: Tensor, gain: Tensor) -> Tensor:
        """See `Operations.fold`."""
        return matrix * gain

    def fold_backward(self, d_folded: Tensor, matrix: Tensor, gain: Tensor, d_matrix: Tensor) -> Tensor:
        """See `Operations.fold_backward`."""
        count, width = matrix.shape
        pieces = triton.cdiv(count, FOLD_ROWS)
        sums = torch.empty(pieces, width, device=matrix.device)
        rowwise.fold_backward_kernel[(triton.cdiv(width, FOLD_BLOCK), pieces)](
            d_folded, matrix, matrix.stride(0), gain, d_matrix, d_matrix.stride(0), sums, count, width,
            RB=FOLD_ROWS, B=FOLD_BLOCK, num_warps=4,
        )  # fmt: skip
        return sums.sum(0)

    def gather_sum(self, x: Tensor, pair_Kn: Tensor, steps: int, first: Tensor | None) -> Tensor:
        """See `Operations.gather_sum`."""
        count, width = len(pair_Kn) // steps, x.shape[1]
        out = x.new_empty(count, width)
        block = min(GATHER_BLOCK, triton.next_power_of_2(width))
        rowwise.gather_sum_kernel[(count, triton.cdiv(width, block))](
            x, x.stride(0), x if first is None else first, pair_Kn, out, count, width, STEPS=steps,
            HAS_FIRST=first is not None, B=block, num_warps=4,
        )  # fmt: skip
        return out

    def scale(self, x: Tensor, factor: Tensor, out: Tensor) -> None:
        """See `Operations.scale`."""
        count = x.numel()
        rowwise.scale_kernel[(triton.cdiv(count, SCALE_BLOCK),)](x, factor, out, count, B=SCALE_BLOCK, num_warps=8)

    def score(
        self, logits_RVd: Tensor, teacher_UVd: Tensor, label_R: Tensor, first_label: int, loss: LossName, *, overlap: bool
    ) -> Scores:  # fmt: skip
        """See `Operations.score`."""
        count, vocabulary = logits_RVd.shape
        distance, alpha, below, student, teacher = torch.empty(5, count, device=logits_RVd.device)
        best = torch.empty(count, dtype=torch.long, device=logits_RVd.device)
        scoring.score_kernel[(count,)](
            logits_RVd, teacher_UVd, label_R, first_label, distance, alpha, below, best, student, teacher, vocabulary,
            LOSS=loss, OVERLAP=overlap or loss in ("tv", "lk"), B=min(SCORE_BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=SCORE_WARPS,
        )  # fmt: skip
        return Scores(distance, alpha, below, best, student, teacher)

    def score_backward(
        self, logits_RVd: Tensor, teacher_UVd: Tensor, label_R: Tensor, first_label: int, loss: LossName, scores: Scores,
        d_distance_R: Tensor, d_overlap_R: Tensor | None,
    ) -> None:  # fmt: skip
        """See `Operations.score_backward`."""
        by_entropy, by_overlap = row_coefficients(loss, scores.overlap, d_distance_R, d_overlap_R)
        count, vocabulary = logits_RVd.shape
        block = min(SCORE_BLOCK, triton.next_power_of_2(vocabulary))
        scoring.score_backward_kernel[(count, triton.cdiv(vocabulary, block))](
            logits_RVd, teacher_UVd, label_R, first_label, scores.below, scores.student_log_sum, scores.teacher_log_sum,
            by_entropy, by_entropy if by_overlap is None else by_overlap, vocabulary, HAS_C2=by_overlap is not None,
            B=block, num_warps=SCORE_WARPS,
        )  # fmt: skip

    def attention(
        self, layout: RowLayout, tables: Tables, queries_PW: Tensor, keys_J2KV: Tensor, out_PA: Tensor
    ) -> Attention:
        """See `Operations.attention`; head sizes that are no power of two from 16 on take torch's."""
        c = self._config
        if c.head_dim < 16 or c.head_dim & (c.head_dim - 1):
            return PlainAttention(c, layout, queries_PW, keys_J2KV, out_PA)
        sizes = self._sizes or tile_sizes(
            c.head_dim, c.num_heads // c.num_kv_heads, queries_PW.element_size(), queries_PW.device
        )
        return TritonAttention(c, layout, tables, queries_PW, keys_J2KV, out_PA, sizes)
