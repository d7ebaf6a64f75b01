"""Kernels that walk rows: norms, rotation, gated activation, folded gains, gathered sums. One pass over memory each.

Shapes: one program per row unless said; H hidden size, I inner size, D2 half a head, B block of columns.
"""
# Triton's functions are compiled from their source; they have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnnecessaryComparison=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportUnusedVariable=false, reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_norm"], do_not_specialize_on_alignment=["RSTD", "IDX"])
def norm_kernel(X, Y, IDX, GAIN, R, N, RSTD, n_norm, H, eps,
                HAS_Y: tl.constexpr, HAS_IDX: tl.constexpr, HAS_GAIN: tl.constexpr, KEEP: tl.constexpr,
                B: tl.constexpr):  # fmt: skip
    """r = X[IDX[i]] + Y[i] (kept in R); N[i] = r rstd GAIN for the first n_norm rows."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, B)
    inside = c < H
    source = i
    if HAS_IDX:
        source = tl.load(IDX + i).to(tl.int64)
    x = tl.load(X + source * H + c, mask=inside, other=0.0).to(tl.float32)
    if HAS_Y:
        x += tl.load(Y + i * H + c, mask=inside, other=0.0).to(tl.float32)
    if KEEP:
        # What is normed is what is kept: the rounded sum.
        x = x.to(R.dtype.element_ty).to(tl.float32)
        tl.store(R + i * H + c, x.to(R.dtype.element_ty), mask=inside)
    if i < n_norm:
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
        y = x * rstd
        if HAS_GAIN:
            y *= tl.load(GAIN + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(RSTD + i, rstd)
        tl.store(N + i * H + c, y.to(N.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["RSTD", "IDX"])
def norm_backward_kernel(D, X, IDX, RSTD, GAIN, RES, OUT, SUMS, n, H,
                         HAS_IDX: tl.constexpr, HAS_RES: tl.constexpr, ADD: tl.constexpr, B: tl.constexpr):  # fmt: skip
    """OUT[j] (+)= d norm(X[j]) (+ RES[i]) with j = IDX[i] or i; SUMS[program] += this program's part of the gain's gradient.

    A fixed number of programs share the rows, so the sums have a fixed order.
    """
    pid = tl.program_id(0)
    c = tl.arange(0, B)
    inside = c < H
    gain = tl.load(GAIN + c, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([B], tl.float32)
    for i in range(pid, n, tl.num_programs(0)):
        i64 = tl.cast(i, tl.int64)
        j = i64
        if HAS_IDX:
            j = tl.load(IDX + i64).to(tl.int64)
        rstd = tl.load(RSTD + i64)
        normed = tl.load(X + j * H + c, mask=inside, other=0.0).to(tl.float32) * rstd
        d = tl.load(D + i64 * H + c, mask=inside, other=0.0).to(tl.float32)
        sums += d * normed
        d *= gain
        dx = rstd * (d - normed * (tl.sum(d * normed, 0) / H))
        if HAS_RES:
            dx += tl.load(RES + i64 * H + c, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            dx += tl.load(OUT + j * H + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + j * H + c, dx.to(OUT.dtype.element_ty), mask=inside)
    tl.store(SUMS + pid * H + c, tl.load(SUMS + pid * H + c, mask=inside, other=0.0) + sums, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["POS", "IDX"])
def rotate_kernel(X, ldx, E, lde, IDX, POS, COS, SIN, sign, rotated,
                  HAS_E: tl.constexpr, HAS_IDX: tl.constexpr, HEADS: tl.constexpr, D2: tl.constexpr):  # fmt: skip
    """X = rotate(X + E[IDX]) for the first `rotated` heads, X + E[IDX] for the rest; sign -1 rotates back."""
    i = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, D2)
    at = h[:, None] * (2 * D2) + d[None, :]
    a = tl.load(X + i * ldx + at).to(tl.float32)
    b = tl.load(X + i * ldx + at + D2).to(tl.float32)
    if HAS_E:
        e = i
        if HAS_IDX:
            e = tl.load(IDX + i).to(tl.int64)
        a += tl.load(E + e * lde + at).to(tl.float32)
        b += tl.load(E + e * lde + at + D2).to(tl.float32)
    p = tl.load(POS + i).to(tl.int64)
    cos = tl.load(COS + p * D2 + d)[None, :]
    sin = tl.load(SIN + p * D2 + d)[None, :] * sign
    turns = h[:, None] < rotated
    tl.store(X + i * ldx + at, tl.where(turns, a * cos - b * sin, a).to(X.dtype.element_ty))
    tl.store(X + i * ldx + at + D2, tl.where(turns, b * cos + a * sin, b).to(X.dtype.element_ty))


@triton.jit
def activation(x, ACT: tl.constexpr):
    """(value, slope) of the activation at x."""
    if ACT == "silu":
        s = 1.0 / (1.0 + tl.exp(-x))
        value = x * s
        slope = s * (1.0 + x * (1.0 - s))
    elif ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * cdf
        slope = cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACT == "gelu_pytorch_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        tanh = 2.0 / (1.0 + tl.exp(-2.0 * inner)) - 1.0
        value = 0.5 * x * (1.0 + tanh)
        grown = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
        slope = 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * grown
    else:
        value = tl.maximum(x, 0.0)
        slope = tl.where(x > 0.0, 1.0, 0.0)
    return value, slope


@triton.jit
def gate_kernel(GU, OUT, inner, ACT: tl.constexpr, BACKWARD: tl.constexpr, B: tl.constexpr):
    """OUT = act(gate) up, or with BACKWARD: OUT holds its gradient and GU becomes (d gate, d up)."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * B + tl.arange(0, B)
    inside = c < inner
    at = GU + i * 2 * inner + c
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    value, slope = activation(gate, ACT)
    if BACKWARD:
        d = tl.load(OUT + i * inner + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (d * up * slope).to(GU.dtype.element_ty), mask=inside)
        tl.store(at + inner, (d * value).to(GU.dtype.element_ty), mask=inside)
    else:
        tl.store(OUT + i * inner + c, (value * up).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def fold_backward_kernel(DF, M, ldm, GAIN, DM, ldd, PART, rows, C, RB: tl.constexpr, B: tl.constexpr):
    """Gradient of M x GAIN: DM = DF x GAIN, PART[program] = column sums of DF x M. One program per RB rows and B columns."""
    c = tl.program_id(0) * B + tl.arange(0, B)
    inside = c < C
    gain = tl.load(GAIN + c, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([B], tl.float32)
    first = tl.program_id(1) * RB
    for r in range(first, tl.minimum(first + RB, rows)):
        r64 = tl.cast(r, tl.int64)
        d = tl.load(DF + r64 * C + c, mask=inside, other=0.0).to(tl.float32)
        sums += d * tl.load(M + r64 * ldm + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(DM + r64 * ldd + c, (d * gain).to(DM.dtype.element_ty), mask=inside)
    tl.store(PART + tl.program_id(1) * C + c, sums, mask=inside)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["PAIR"])
def gather_sum_kernel(X, ldx, FIRST, PAIR, OUT, n, C, STEPS: tl.constexpr, HAS_FIRST: tl.constexpr, B: tl.constexpr):
    """OUT[i] = FIRST[i] + sum over the steps of X[PAIR[step, i]], where that is a row."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * B + tl.arange(0, B)
    inside = c < C
    total = tl.zeros([B], tl.float32)
    if HAS_FIRST:
        total = tl.load(FIRST + i * C + c, mask=inside, other=0.0).to(tl.float32)
    for k in range(STEPS):
        r = tl.load(PAIR + k * n + i).to(tl.int64)
        total += tl.load(X + r * ldx + c, mask=inside & (r >= 0), other=0.0).to(tl.float32)
    tl.store(OUT + i * C + c, total.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def scale_kernel(X, FACTOR, OUT, n, B: tl.constexpr):
    """OUT = X FACTOR. One program per B elements."""
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    x = tl.load(X + i, mask=i < n, other=0.0).to(tl.float32) * tl.load(FACTOR)
    tl.store(OUT + i, x.to(OUT.dtype.element_ty), mask=i < n)
