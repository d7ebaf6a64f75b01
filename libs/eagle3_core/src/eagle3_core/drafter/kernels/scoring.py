"""Kernels of the loss: what a row's distance is, and its logits' gradient in place. One program per learning row.

Logits keep the products' dtype and are read once each way; sums are float32 and rescaled block by block as the running
maximum grows, so a row is read once and not once for its maximum and once for its sum.

Shapes: V draft vocabulary, B block of it.
"""
# Triton's functions are compiled from their source; they have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnnecessaryComparison=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportUnusedVariable=false, reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["first"],
            do_not_specialize_on_alignment=["LABEL", "DIST", "ALPHA", "BELOW", "BEST", "ZS", "ZT"])  # fmt: skip
def score_kernel(S, T, LABEL, first, DIST, ALPHA, BELOW, BEST, ZS, ZT, V,
                 LOSS: tl.constexpr, OVERLAP: tl.constexpr, B: tl.constexpr):  # fmt: skip
    """Distance, alpha, the mass below, best id and both log sums of row r against label LABEL[r] - first."""
    r = tl.program_id(0).to(tl.int64)
    sp = S + r * V
    tp = T + (tl.load(LABEL + r).to(tl.int64) - first) * V
    cb = tl.arange(0, B)
    lane_max = tl.full([B], LOWEST, tl.float32)
    lane_at = tl.zeros([B], tl.int32)
    ms = tl.full([], LOWEST, tl.float32)
    mt = tl.full([], LOWEST, tl.float32)
    ls = tl.zeros([B], tl.float32)
    lt = tl.zeros([B], tl.float32)
    by_s = tl.zeros([B], tl.float32)
    by_t = tl.zeros([B], tl.float32)
    for c0 in range(0, V, B):
        c = c0 + cb
        s = tl.load(sp + c, mask=c < V, other=LOWEST).to(tl.float32)
        t = tl.load(tp + c, mask=c < V, other=LOWEST).to(tl.float32)
        lane_at = tl.where(s > lane_max, c, lane_at)
        lane_max = tl.maximum(lane_max, s)
        ms1 = tl.maximum(ms, tl.max(s, 0))
        mt1 = tl.maximum(mt, tl.max(t, 0))
        keep = tl.exp(mt - mt1)
        ls = ls * tl.exp(ms - ms1) + tl.exp(s - ms1)
        e = tl.exp(t - mt1)
        lt = lt * keep + e
        by_s = by_s * keep + tl.where(c < V, e * s, 0.0)
        if LOSS != "soft_ce":
            by_t = by_t * keep + tl.where(c < V, e * t, 0.0)
        ms = ms1
        mt = mt1
    best = tl.min(tl.where(lane_max == ms, lane_at, V), 0)
    sum_t = tl.sum(lt, 0)
    zs = ms + tl.log(tl.sum(ls, 0))
    zt = mt + tl.log(sum_t)
    distance = zs - tl.sum(by_s, 0) / sum_t
    alpha = 1.0
    below = 0.0
    if OVERLAP:
        shared = tl.zeros([B], tl.float32)
        under = tl.zeros([B], tl.float32)
        for c0 in range(0, V, B):
            c = c0 + cb
            q = tl.exp(tl.load(sp + c, mask=c < V, other=LOWEST).to(tl.float32) - zs)
            p = tl.exp(tl.load(tp + c, mask=c < V, other=LOWEST).to(tl.float32) - zt)
            shared += tl.minimum(p, q)
            under += tl.where(q < p, q, 0.0)
        alpha = tl.sum(shared, 0)
        below = tl.sum(under, 0)
    if LOSS != "soft_ce":
        distance -= zt - tl.sum(by_t, 0) / sum_t
    if LOSS == "tv":
        distance = 1.0 - alpha
    if LOSS == "lk":
        share = tl.exp(-3.0 * alpha)
        distance = share * distance + (1.0 - share) * (1.0 - alpha)
    tl.store(DIST + r, distance)
    tl.store(ALPHA + r, alpha)
    tl.store(BELOW + r, below)
    tl.store(BEST + r, best.to(tl.int64))
    tl.store(ZS + r, zs)
    tl.store(ZT + r, zt)


@triton.jit(do_not_specialize=["first"],
            do_not_specialize_on_alignment=["LABEL", "BELOW", "ZS", "ZT", "C1", "C2"])  # fmt: skip
def score_backward_kernel(S, T, LABEL, first, BELOW, ZS, ZT, C1, C2, V, HAS_C2: tl.constexpr, B: tl.constexpr):
    """S = C1 (q - p) + C2 q ([q < p] - BELOW), in place. One program per row and block."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * B + tl.arange(0, B)
    inside = c < V
    at = S + r * V + c
    q = tl.exp(tl.load(at, mask=inside, other=LOWEST).to(tl.float32) - tl.load(ZS + r))
    teacher = T + (tl.load(LABEL + r).to(tl.int64) - first) * V + c
    p = tl.exp(tl.load(teacher, mask=inside, other=LOWEST).to(tl.float32) - tl.load(ZT + r))
    d = tl.load(C1 + r) * (q - p)
    if HAS_C2:
        d += tl.load(C2 + r) * q * (tl.where(q < p, 1.0, 0.0) - tl.load(BELOW + r))
    tl.store(at, d.to(S.dtype.element_ty), mask=inside)
