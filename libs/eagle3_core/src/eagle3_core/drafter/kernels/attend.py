"""Kernels of the attention: forward, and the backward in three parts (queries, a chain's own keys, step-0 keys).

The query row of chain m in step k is OFFSET[k] + m. It sees step-0 keys FIRST[row] <= j <= START[row], and its chain's own
keys of steps 1..k, the rows OFFSET[i] + m. One softmax covers both; its log-sum (base 2, in LSE) makes each part's
gradient that of an ordinary attention with delta = sum(d_out x out). Tiles that every row of a block sees whole need no
mask; tiles at the edge of a document or of the causal triangle do.

The step-0 keys' gradient is made by one launch after the chains: a program owns a block of keys and walks the tiles of
query rows, of all steps, that see it (`kernels.tiles` lists them). So nothing is added atomically, and a gradient is the
same bits in every run.

Shapes: rows BM, keys BN, D head size, G query heads per key-value head, W columns of QKV (A of queries, then KV of keys
and KV of values).
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


@triton.jit
def tile(X, DESC, r0, col, ld, rows, BR: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr, TMA: tl.constexpr):
    """X[r0 : r0 + BR, col : col + D]; rows >= `rows` read as 0 if MASK (through a descriptor always)."""
    if TMA:
        return DESC.load([r0, col])
    else:
        r = r0 + tl.arange(0, BR)
        at = X + r.to(tl.int64)[:, None] * ld + col + tl.arange(0, D)[None, :]
        if MASK:
            return tl.load(at, mask=(r < rows)[:, None], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def key_blocks(start, first, ok, J, BN: tl.constexpr):
    """Blocks [lo, hi) are seen by some row, [flo, fhi) by every row whole."""
    hi = tl.max(tl.where(ok, start, -1), 0) // BN + 1
    lo = tl.min(tl.where(ok, first, J), 0) // BN
    flo = tl.minimum((tl.max(tl.where(ok, first, 0), 0) + BN - 1) // BN, hi)
    fhi = tl.maximum((tl.min(tl.where(ok, start, J), 0) + 1) // BN, flo)
    return lo, flo, fhi, hi


@triton.jit(do_not_specialize=["k", "n", "J", "P"], do_not_specialize_on_alignment=["LSE", "START", "FIRST", "OFFSET"])
def forward_kernel(QKV, KV0, KVD, OUT, LSE, START, FIRST, OFFSET, k, n, J, P, qk_scale, W, A, KV,
                   G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr,
                   DOT: tl.constexpr):  # fmt: skip
    """OUT and LSE of step k's rows. One program per BM rows and query head; the longest look back comes first."""
    h = tl.program_id(1)
    hk = h // G
    m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM + tl.arange(0, BM)
    ok = m < n
    d = tl.arange(0, D)
    row = (tl.load(OFFSET + k) + m).to(tl.int64)
    qp = QKV + row[:, None] * W + h * D + d[None, :]
    q = tl.load(qp, mask=ok[:, None], other=0.0)
    start = tl.load(START + row, mask=ok, other=-1).to(tl.int32)
    first = tl.load(FIRST + row, mask=ok, other=0).to(tl.int32)
    lo, flo, fhi, hi = key_blocks(start, first, ok, J, BN)
    top = tl.zeros([BM], tl.float32) + LOWEST
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    cb = tl.arange(0, BN)
    for b in range(flo, fhi):
        kk = tile(KV0, KVD, b * BN, hk * D, 2 * KV, J, BN, D, False, TMA)
        s = tl.dot(q, tl.trans(kk), input_precision=DOT)
        new = tl.maximum(top, tl.max(s, 1) * qk_scale)
        p = tl.math.exp2(s * qk_scale - new[:, None])
        fade = tl.math.exp2(top - new)
        total = total * fade + tl.sum(p, 1)
        v = tile(KV0, KVD, b * BN, KV + hk * D, 2 * KV, J, BN, D, False, TMA)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=DOT)
        top = new
    below = flo - lo
    for j in range(0, below + hi - fhi):
        c0 = tl.where(j < below, lo + j, fhi + j - below) * BN
        c = c0 + cb
        kk = tile(KV0, KVD, c0, hk * D, 2 * KV, J, BN, D, True, TMA)
        s = tl.dot(q, tl.trans(kk), input_precision=DOT) * qk_scale
        s = tl.where((c[None, :] <= start[:, None]) & (c[None, :] >= first[:, None]), s, LOWEST)
        new = tl.maximum(
            top, tl.max(s, 1)
        )  # a row without a key so far collects garbage, which fade = 0 wipes out later
        p = tl.math.exp2(s - new[:, None])
        fade = tl.math.exp2(top - new)
        total = total * fade + tl.sum(p, 1)
        v = tile(KV0, KVD, c0, KV + hk * D, 2 * KV, J, BN, D, True, TMA)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=DOT)
        top = new
    for i in range(1, k + 1):
        own = QKV + (tl.load(OFFSET + i) + m).to(tl.int64)[:, None] * W + A + hk * D + d[None, :]
        qf = tl.load(qp, mask=ok[:, None], other=0.0).to(tl.float32)
        s1 = tl.sum(qf * tl.load(own, mask=ok[:, None], other=0.0).to(tl.float32), 1) * qk_scale
        new = tl.maximum(top, s1)
        p1 = tl.math.exp2(s1 - new)
        fade = tl.math.exp2(top - new)
        total = total * fade + p1
        value = tl.load(own + KV, mask=ok[:, None], other=0.0).to(tl.float32)
        acc = acc * fade[:, None] + p1[:, None] * value
        top = new
    o = acc / total[:, None]
    tl.store(OUT + row[:, None] * A + h * D + d[None, :], o.to(OUT.dtype.element_ty), mask=ok[:, None])
    tl.store(LSE + h * P + row, top + tl.math.log2(total), mask=ok)


@triton.jit(do_not_specialize=["k", "n", "J", "P"],
            do_not_specialize_on_alignment=["LSE", "DELTA", "START", "FIRST", "OFFSET"])  # fmt: skip
def query_gradient_kernel(QKV, KV0, KVD, OUT, DOUT, LSE, DELTA, DQKV, START, FIRST, OFFSET, k, n, J, P, scale, qk_scale,
                          W, A, KV, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BM: tl.constexpr,
                          BN: tl.constexpr, TMA: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Step k's gradient of the queries, and DELTA. One program per BM rows of HEADS query heads, which share their keys."""
    hk = tl.program_id(1) * HEADS // G
    lane = tl.arange(0, HEADS * BM)
    h = tl.program_id(1) * HEADS + lane // BM
    m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM + lane % BM
    ok = m < n
    d = tl.arange(0, D)
    row = (tl.load(OFFSET + k) + m).to(tl.int64)
    q = tl.load(QKV + row[:, None] * W + h[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
    do = tl.load(DOUT + row[:, None] * A + h[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
    o = tl.load(OUT + row[:, None] * A + h[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(DELTA + h * P + row, delta, mask=ok)
    lse = tl.load(LSE + h * P + row, mask=ok, other=0.0)
    start = tl.load(START + row, mask=ok, other=-1).to(tl.int32)
    first = tl.load(FIRST + row, mask=ok, other=0).to(tl.int32)
    lo, flo, fhi, hi = key_blocks(start, first, ok, J, BN)
    dq = tl.zeros([HEADS * BM, D], tl.float32)
    cb = tl.arange(0, BN)
    for b in range(flo, fhi):
        kk = tile(KV0, KVD, b * BN, hk * D, 2 * KV, J, BN, D, False, TMA)
        vv = tile(KV0, KVD, b * BN, KV + hk * D, 2 * KV, J, BN, D, False, TMA)
        p = tl.math.exp2(tl.dot(q, tl.trans(kk), input_precision=DOT) * qk_scale - lse[:, None])
        ds = p * (tl.dot(do, tl.trans(vv), input_precision=DOT) - delta[:, None])
        dq = tl.dot(ds.to(kk.dtype), kk, dq, input_precision=DOT)
    below = flo - lo
    for j in range(0, below + hi - fhi):
        c0 = tl.where(j < below, lo + j, fhi + j - below) * BN
        c = c0 + cb
        kk = tile(KV0, KVD, c0, hk * D, 2 * KV, J, BN, D, True, TMA)
        vv = tile(KV0, KVD, c0, KV + hk * D, 2 * KV, J, BN, D, True, TMA)
        see = (c[None, :] <= start[:, None]) & (c[None, :] >= first[:, None])
        s = tl.dot(q, tl.trans(kk), input_precision=DOT) * qk_scale
        p = tl.where(see, tl.math.exp2(s - lse[:, None]), 0.0)
        ds = p * (tl.dot(do, tl.trans(vv), input_precision=DOT) - delta[:, None])
        dq = tl.dot(ds.to(kk.dtype), kk, dq, input_precision=DOT)
    for i in range(1, k + 1):
        own = QKV + (tl.load(OFFSET + i) + m).to(tl.int64)[:, None] * W + A + hk * D + d[None, :]
        key = tl.load(own, mask=ok[:, None], other=0.0).to(tl.float32)
        value = tl.load(own + KV, mask=ok[:, None], other=0.0).to(tl.float32)
        p1 = tl.math.exp2(tl.sum(q.to(tl.float32) * key, 1) * qk_scale - lse)
        dq += (p1 * (tl.sum(do.to(tl.float32) * value, 1) - delta))[:, None] * key
    tl.store(
        DQKV + row[:, None] * W + h[:, None] * D + d[None, :], (dq * scale).to(DQKV.dtype.element_ty), mask=ok[:, None]
    )


@triton.jit(do_not_specialize=["k", "n", "P"], do_not_specialize_on_alignment=["LSE", "DELTA", "OFFSET"])
def own_gradient_kernel(QKV, DOUT, LSE, DELTA, DQKV, OFFSET, k, n, P, scale, qk_scale, W, A, KV, STEPS: tl.constexpr,
                        G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Gradient of the keys and values that chains wrote in step k, from their queries of step k and all later ones.

    One program per BM chains and key-value head. Steps end before k in the backward pass, so all that is read is there.
    """
    hk = tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = (m < n)[:, None]
    d = tl.arange(0, D)
    own = (tl.load(OFFSET + k) + m).to(tl.int64)[:, None] * W + A + hk * D + d[None, :]
    key = tl.load(QKV + own, mask=ok, other=0.0).to(tl.float32)
    value = tl.load(QKV + own + KV, mask=ok, other=0.0).to(tl.float32)
    dk = tl.zeros([BM, D], tl.float32)
    dv = tl.zeros([BM, D], tl.float32)
    for j in range(k * G, STEPS * G):
        offset = tl.load(OFFSET + j // G)
        alive = m < tl.load(OFFSET + j // G + 1) - offset
        row = (offset + m).to(tl.int64)
        h = hk * G + j % G
        q = tl.load(QKV + row[:, None] * W + h * D + d[None, :], mask=alive[:, None], other=0.0).to(tl.float32)
        do = tl.load(DOUT + row[:, None] * A + h * D + d[None, :], mask=alive[:, None], other=0.0).to(tl.float32)
        lse = tl.load(LSE + h * P + row, mask=alive, other=0.0)
        delta = tl.load(DELTA + h * P + row, mask=alive, other=0.0)
        p = tl.math.exp2(tl.sum(q * key, 1) * qk_scale - lse)
        ds = p * (tl.sum(do * value, 1) - delta) * scale
        dk += ds[:, None] * q
        dv += p[:, None] * do
    tl.store(DQKV + own, dk.to(DQKV.dtype.element_ty), mask=ok)
    tl.store(DQKV + own + KV, dv.to(DQKV.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["NT", "J", "P"],
            do_not_specialize_on_alignment=["LSE", "DELTA", "START", "FIRST", "WHOLE", "WHOLES", "PART", "PARTS", "ROW",
                                            "END"])  # fmt: skip
def key_gradient_kernel(QKV, QD, KV0, DOUT, DOD, LSE, DELTA, START, FIRST, ROW, END, WHOLE, WHOLES, PART, PARTS, NT, DKV0,
                        J, P, scale, qk_scale, W, A, KV, G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
                        BM: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Gradient of BN step-0 keys and values from the queries of all steps. One program per key block, key-value head and
    HEADS of its group's G query heads, each with a plane of DKV0 [G / HEADS, J, 2 KV] of its own.

    WHOLE and PART [blocks, NT]: tiles of query rows that see the block wholly or partly; WHOLES, PARTS: how many.
    ROW, END [NT]: first row of a tile, and the row behind its step's last.
    """
    b = tl.program_id(0)
    hk = tl.program_id(1)
    c = b * BN + tl.arange(0, BN)
    inside = (c < J)[:, None]
    d = tl.arange(0, D)
    at = c.to(tl.int64)[:, None] * (2 * KV) + hk * D + d[None, :]
    kk = tl.load(KV0 + at, mask=inside, other=0.0)
    vv = tl.load(KV0 + KV + at, mask=inside, other=0.0)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    part = tl.program_id(2)
    rb = tl.arange(0, BM)
    list_at = b.to(tl.int64) * NT
    for j in range(0, tl.load(WHOLES + b) * HEADS):
        h = hk * G + part * HEADS + j % HEADS
        r0 = tl.load(ROW + tl.load(WHOLE + list_at + j // HEADS)).to(tl.int32)
        r = r0 + rb
        q = tile(QKV, QD, r0, h * D, W, P, BM, D, False, TMA)
        do = tile(DOUT, DOD, r0, h * D, A, P, BM, D, False, TMA)
        lse = tl.load(LSE + h * P + r)
        delta = tl.load(DELTA + h * P + r)
        p = tl.math.exp2(tl.dot(kk, tl.trans(q), input_precision=DOT) * qk_scale - lse[None, :])
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=DOT)
        ds = p * (tl.dot(vv, tl.trans(do), input_precision=DOT) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=DOT)
    for j in range(0, tl.load(PARTS + b) * HEADS):
        h = hk * G + part * HEADS + j % HEADS
        t = tl.load(PART + list_at + j // HEADS)
        r0 = tl.load(ROW + t).to(tl.int32)
        r = r0 + rb
        ok = r < tl.load(END + t)
        q = tile(QKV, QD, r0, h * D, W, P, BM, D, True, TMA)
        do = tile(DOUT, DOD, r0, h * D, A, P, BM, D, True, TMA)
        lse = tl.load(LSE + h * P + r, mask=ok, other=0.0)
        delta = tl.load(DELTA + h * P + r, mask=ok, other=0.0)
        start = tl.load(START + r, mask=ok, other=-1).to(tl.int32)  # -1 hides the rows of the next step
        first = tl.load(FIRST + r, mask=ok, other=0).to(tl.int32)
        see = (c[:, None] <= start[None, :]) & (c[:, None] >= first[None, :])
        s = tl.dot(kk, tl.trans(q), input_precision=DOT) * qk_scale
        p = tl.where(see, tl.math.exp2(s - lse[None, :]), 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=DOT)
        ds = p * (tl.dot(vv, tl.trans(do), input_precision=DOT) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=DOT)
    at += part.to(tl.int64) * J * (2 * KV)
    tl.store(DKV0 + at, (dk * scale).to(DKV0.dtype.element_ty), mask=inside)
    tl.store(DKV0 + KV + at, dv.to(DKV0.dtype.element_ty), mask=inside)
