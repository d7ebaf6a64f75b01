"""Rotary positions of the drafter, from the same parameters the verifier uses; scaled ones are computed by transformers.

Cosines and sines are tabulated in float32 once per device and dtype and looked up by position: training rotates the
same few hundred positions in every step. The half-split ("neox") layout is the one Llama checkpoints and SGLang use.

Shapes: P tabulated positions, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3_core.drafter.config import DrafterConfig


def llama_config(config: DrafterConfig) -> Any:
    """transformers' `LlamaConfig` of the drafter's one layer."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_act=config.hidden_act,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def _frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """[D/2] angle per position and the factor of cosines and sines, as transformers' `LlamaRotaryEmbedding` has them.

    Positions without scaling need no more than this formula (RoFormer, eq. 15), and a process that only trains such a
    drafter never imports transformers (6 s of CPU).
    """
    if config.rope_parameters["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](llama_config(config))
    return frequencies.float(), float(scale)


class Rope:
    """Rotates queries and keys to their positions."""

    def __init__(self, config: DrafterConfig) -> None:
        self.inverse_frequencies, self.scale = _frequencies(config)
        """[D/2] float32 angle per position, scaling included; factor of all cosines and sines (yarn)."""
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._halves: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., heads, D] rotated to integer `positions` [...], in x's dtype."""
        cos_PD, sin_PD = self._table(x, int(positions.max()) + 1 if positions.numel() else 1)
        half = x.shape[-1] // 2
        return x * cos_PD[positions].unsqueeze(-2) + x.roll(half, -1) * sin_PD[positions].unsqueeze(-2)

    def half_tables(self, device: torch.device, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [>= length, D/2] float32 on `device`, scaled; what `Operations.rotate` reads."""
        held = self._halves.get(device)
        if held is None or len(held[0]) < length:
            rows = 1 << max(length - 1, 255).bit_length()
            angles = torch.arange(rows, dtype=torch.float32)[:, None] * self.inverse_frequencies
            held = (angles.cos() * self.scale).to(device), (angles.sin() * self.scale).to(device)
            self._halves[device] = held
        return held

    def _table(self, like: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [P >= length, D]; the sines of the first half negated, so a roll by D/2 replaces a split."""
        key = (like.device, like.dtype)
        if key not in self._tables or len(self._tables[key][0]) < length:
            rows = 1 << max(length - 1, 255).bit_length()
            angles = torch.arange(rows, dtype=torch.float32)[:, None] * self.inverse_frequencies
            cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
            tables = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
            self._tables[key] = (tables[0].to(like), tables[1].to(like))
        return self._tables[key]
