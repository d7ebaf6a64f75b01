"""The random weights that a drafter starts from: bit for bit those of speculators' fresh module of the same seed.

They are drawn here, in the order in which that module draws them, because to import it costs a process 12 s of CPU
beyond torch, and a training process that was killed pays it again before its first step. A test compares the two.

Shapes: H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.tensors import LAYER, tensor_shapes

ATTENTION = tuple(f"{LAYER}self_attn.{name}_proj.weight" for name in "qkvo")
MLP = tuple(f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
STD = 0.02
"""Of every random product. The library does not find the verifier's `initializer_range` and takes transformers' default."""


def initial_weights(config: DrafterConfig, seed: int) -> dict[str, Tensor]:
    """Every trainable tensor by name, float32: products from N(0, 0.02), norms 1, a head of NaN.

    The head is the caller's to fill; one that was forgotten must not train.
    """
    draw = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(config)
    _skip_what_construction_draws(config, shapes, draw)
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    weights["lm_head.weight"].fill_(torch.nan)
    for name in ("fc.weight", *ATTENTION, *MLP):
        weights[name].normal_(0.0, STD, generator=draw)
    return weights


def _skip_what_construction_draws(
    config: DrafterConfig, shapes: dict[str, tuple[int, ...]], draw: torch.Generator
) -> None:
    """Move `draw` past the values that torch's modules fill themselves with before they are initialised for good.

    The embedding [V, H] draws normals; two heads [Vd, H], `fc`, a Llama layer with projections of width H and then q, k
    and v of width 2H draw uniforms.
    """
    hidden, head = config.hidden_size, shapes["lm_head.weight"]
    torch.empty(config.vocab_size, hidden).normal_(generator=draw)
    narrow = [(shapes[name][0], hidden) for name in ATTENTION[:3]]
    wide = [shapes[name] for name in ATTENTION[:3]]
    rest = [shapes[name] for name in (ATTENTION[3], *MLP)]
    for shape in (head, head, shapes["fc.weight"], *narrow, *rest, *wide):
        torch.empty(shape).uniform_(generator=draw)
