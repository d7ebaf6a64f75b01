"""Names and shapes of a drafter's tensors, as data: whoever checks a checkpoint need not load a tensor library."""

from __future__ import annotations

from typing import Protocol

LAYER = "layers.0."
"""Prefix of the one decoder layer, as speculators names it."""
SGLANG_LAYER = "midlayer."
"""The same in SGLang's checkpoints."""


class Sizes(Protocol):
    """What decides the shapes; a `DrafterConfig` says it, and so does the config of an exported drafter."""

    @property
    def hidden_size(self) -> int:
        """H, the verifier's."""
        ...

    @property
    def intermediate_size(self) -> int:
        """Width of the layer's MLP."""
        ...

    @property
    def num_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads."""
        ...

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Vd, tokens the drafter can propose."""
        ...

    @property
    def fc_norm(self) -> bool:
        """Whether each aux state has a norm of its own."""
        ...


def tensor_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that training may change."""
    c, pair = sizes, 2 * sizes.hidden_size
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (c.hidden_size, 3 * c.hidden_size),
        "norm.weight": (c.hidden_size,),
        "lm_head.weight": (c.draft_vocab_size, c.hidden_size),
        LAYER + "self_attn.q_proj.weight": (q, pair),
        LAYER + "self_attn.k_proj.weight": (kv, pair),
        LAYER + "self_attn.v_proj.weight": (kv, pair),
        LAYER + "self_attn.o_proj.weight": (c.hidden_size, q),
        LAYER + "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
        LAYER + "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
        LAYER + "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
    }
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    shapes |= {f"{LAYER}{norm}.weight": (c.hidden_size,) for norm in norms}
    if c.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (c.hidden_size,) for i in range(3)}
    return shapes
