"""A new drafter: random weights, and from the verifier its embedding, head and, if asked, layer.

Weights, names and checkpoint are those of speculators' `Eagle3DraftModel`. Only what writes or reads such a checkpoint
imports that library, within its function: 12 s of CPU beyond torch, which no training process should pay at its start.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3_core.drafter.config import DrafterConfig, Undraftable, drafter_config
from eagle3_core.drafter.initial import initial_weights
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.rope import llama_config
from eagle3_core.drafter.tensors import LAYER
from eagle3_core.drafter.verifier_parts import VerifierParts

FC_SHARE = 0.1
"""Scale of the random `fc` under `init: verifier_layer`, beside an identity on the last aux state (measured start)."""


def speculators_config(config: DrafterConfig, verifier: str | None, attention: str = "eager") -> Any:
    """speculators' `Eagle3SpeculatorConfig` of a drafter; `verifier` is the name or path it will load the rest from."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = llama_config(config)
    layer._attn_implementation = attention
    return Eagle3SpeculatorConfig(
        architectures=["Eagle3DraftModel"],
        transformer_layer_config=layer,
        draft_vocab_size=config.draft_vocab_size,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        embed_requires_grad=False,
        eagle_aux_hidden_state_layer_ids=list(config.aux_layers),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=config.ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=verifier, architectures=list(config.verifier_architectures)),
        ),
    )


def speculators_module(config: DrafterConfig, verifier: str | None, seed: int, attention: str = "eager") -> Any:
    """A fresh `Eagle3DraftModel` in float32, its random weights a function of `seed` alone; `attention` as it calls it."""
    from speculators.models.eagle3 import Eagle3DraftModel

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(seed)
        return Eagle3DraftModel(speculators_config(config, verifier, attention)).float()


def build(
    verifier: Path,
    *,
    algorithm: Literal["eagle3.1", "eagle3"],
    init: Literal["random", "verifier_layer"],
    aux_layers: tuple[int, int, int],
    ttt_steps: int,
    d2t_Vd: Tensor,
    t2d_V: Tensor,
    seed: int,
    train_lm_head: bool = True,
) -> Drafter:
    """A drafter ready to train, float32 on the CPU, for the verifier checkpoint in folder `verifier`.

    Head and last norm always start as the verifier's (its rows of the draft vocabulary, its final norm); everything else
    is random, or with `init="verifier_layer"` a copy of the verifier's last layer.
    Every weight but a frozen head requires a gradient. Raises Undraftable, DrafterDamaged.
    """
    parts = VerifierParts(verifier)
    config = drafter_config(
        parts.text_config, algorithm=algorithm, aux_layers=aux_layers, draft_vocab_size=len(d2t_Vd), ttt_steps=ttt_steps
    )
    weights = initial_weights(config, seed)
    with torch.no_grad():
        weights["lm_head.weight"].copy_(parts.head()[t2d_V])
        weights["norm.weight"].copy_(parts.norm())
        if init == "verifier_layer":
            _start_from_last_layer(config, weights, parts.last_layer())
    for name, weight in weights.items():
        weight.requires_grad_(train_lm_head or name != "lm_head.weight")
    return Drafter.assemble(config, weights, parts.embedding(), d2t_Vd, t2d_V)


def _start_from_last_layer(config: DrafterConfig, weights: dict[str, Tensor], layer: dict[str, Tensor]) -> None:
    """Copy the verifier's last layer; the drafter then starts as that layer on (nearly) the last aux state.

    The hidden half of q, k and v gets the verifier's projections, the embedding half stays random; `fc` becomes
    0.1 x random plus the identity on the last aux state. Raises Undraftable where names or shapes differ.
    """
    hidden, random = config.hidden_size, dict(weights)
    for proj in ("q_proj", "k_proj", "v_proj"):
        random[f"{LAYER}self_attn.{proj}.weight"] = weights[f"{LAYER}self_attn.{proj}.weight"][:, hidden:]
    source = {
        f"{LAYER}self_attn.{name}.weight": f"self_attn.{name}.weight"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    source |= {f"{LAYER}mlp.{name}.weight": f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
    source[f"{LAYER}hidden_norm.weight"] = "input_layernorm.weight"
    source[f"{LAYER}post_attention_layernorm.weight"] = "post_attention_layernorm.weight"
    have = {ours: tuple(layer[theirs].shape) if theirs in layer else None for ours, theirs in source.items()}
    wrong = {ours: shape for ours, shape in have.items() if shape != tuple(random[ours].shape)}
    extra = sorted(set(layer) - set(source.values()))
    if wrong or extra:
        faults = [
            f"{source[o]} is {s or 'missing'}, the drafter needs {tuple(random[o].shape)}" for o, s in wrong.items()
        ]
        faults += [f"{name} has no place in the drafter" for name in extra]
        raise Undraftable(
            "the verifier's last layer does not fit the drafter's: " + "; ".join(faults[:4]),
            remedy="set training.init to random (verifier_layer needs a Llama-shaped verifier without biases)",
            pointer="/training/init",
        )
    for ours, theirs in source.items():
        random[ours].copy_(layer[theirs])
    fc = weights["fc.weight"].mul_(FC_SHARE)
    fc[:, 2 * hidden :] += torch.eye(hidden)
