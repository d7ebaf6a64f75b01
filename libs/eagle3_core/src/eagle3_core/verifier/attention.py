"""Attention over slots, with grouped queries that never copy keys or values.

The stock implementations repeat each key head for its group of query heads: at batch 64 that copy costs more than the
products. Here the queries of a group become extra rows of one product with the group's single key head.

Shapes: B rows, n tokens a row, T slots, A query heads, k key heads, G = A / k, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from eagle3_core.verifier.cache import current
from eagle3_core.verifier.folder import UnsupportedVerifier

NAME = "slots"
FUSED_FROM_SCORES = 1 << 22
"""Scores a row (A x n x T) above which the fused kernel runs: it never writes them out."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, A, n, D], key [B, k, T, D], value [B, k, T, Dv] -> [B, n, A, Dv]. What may be seen follows from the slots.

    Raises UnsupportedVerifier for attention sinks, which change the softmax.
    """
    if s_aux is not None:
        raise UnsupportedVerifier(
            f"{type(module).__name__} uses attention sinks, which the transformers backend does not compute",
            remedy="use a verifier without attention sinks",
            pointer="/verifier/model",
        )
    rows, heads, n, size = query.shape
    key_heads, length = key.shape[1], key.shape[2]
    group = heads // key_heads
    scale = size**-0.5 if scaling is None else scaling
    bias = current().bias(query.dtype, sliding_window)
    if softcap is None and heads * n * length > FUSED_FROM_SCORES:
        fused = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, scale=scale, enable_gqa=group > 1
        )
        return fused.transpose(1, 2), None
    stacked = query.reshape(rows, key_heads, group * n, size)
    scores = torch.matmul(stacked * scale, key.transpose(-1, -2)).view(rows, key_heads, group, n, length)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = (scores + bias[:, :, None]).softmax(-1, dtype=torch.float32).to(query.dtype)
    mixed = torch.matmul(weights.view(rows, key_heads, group * n, length), value)
    return mixed.view(rows, heads, n, value.shape[-1]).transpose(1, 2), None


AttentionInterface.register(NAME, attend)
