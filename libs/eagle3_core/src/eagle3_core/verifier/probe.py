"""Where the captured states come from: hooks that find their place in any Llama-like model, and prove it.

Aux state i is the input of decoder layer i, the residual stream; `final` is the input of the final norm. Off-by-one
layers and a final state taken after the norm are the two commonest faults of EAGLE-3 captures, and neither shows
before the drafter serves badly. So the probe compares itself with what the model reports about itself before it is used.

Shapes: B rows, n tokens a row, H hidden size, N layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eagle3_core.verifier.base import SelfCheckFailed, States, StatesNotFinite
from eagle3_core.verifier.folder import POINTER, UnsupportedVerifier, VerifierWeights, refusal

NORM_TOLERANCE = 0.02
"""Largest relative difference (Frobenius) of the final norm from an RMS norm: bfloat16 rounds by .004 an element."""

FINITE_REMEDY = (
    "run the verifier in bfloat16 or float32 (float16 overflows); where it does, its weights are damaged: "
    "download the checkpoint again"
)


@dataclass(frozen=True)
class Parts:
    """The parts of a causal language model that matter here."""

    decoder: nn.Module
    """Embedding, layers and final norm; returns the normed last states."""
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Module


def find_parts(model: Any, num_layers: int, hidden_size: int) -> Parts:
    """The decoder layers of `model` and the norm behind them. Raises UnsupportedVerifier where that is not one clear place."""
    stacks = [
        (owner, child)
        for owner in model.modules()
        for child in owner.children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
    ]
    preferred = [pair for pair in stacks if pair[0] is model.get_decoder()]
    chosen = preferred or stacks
    if len(chosen) != 1:
        raise UnsupportedVerifier(
            f"{type(model).__name__} has {len(chosen)} lists of {num_layers} layers, capture needs exactly one",
            remedy="use a decoder-only verifier whose layers are one ModuleList",
            pointer="/verifier/model",
        )
    owner, layers = chosen[0]
    children = list(owner.children())
    behind = children[children.index(layers) + 1 :]
    norms = [m for m in behind if getattr(getattr(m, "weight", None), "shape", None) == (hidden_size,)]
    head = model.get_output_embeddings()
    if len(norms) != 1 or head is None:
        raise UnsupportedVerifier(
            f"{type(model).__name__} has {len(norms)} norms behind its layers and {'no' if head is None else 'an'} output head",
            remedy="use a verifier with one final norm and one output head",
            pointer="/verifier/model",
        )
    return Parts(owner, layers, norms[0], head)


def prove_norm(parts: Parts, eps: float) -> None:
    """Raise UnsupportedVerifier unless the final norm is an RMS norm of gain w with `eps`: what the teacher computes.

    A layer norm takes the mean away, Gemma's gain is 1 + w: a drafter trained on the wrong one only ever serves badly.
    Raises VerifierWeights for a gain that is no number: that says nothing about the kind of norm.
    """
    gain: Tensor = parts.norm.weight  # type: ignore[assignment]
    if not bool(torch.isfinite(gain).all()):
        raise refusal(
            VerifierWeights,
            f"the final norm's gain is NaN or infinite in {gain.dtype}, first at {int(torch.nonzero(~torch.isfinite(gain))[0])}",
            FINITE_REMEDY,
        )
    state = torch.linspace(-1, 3, len(gain), device=gain.device, dtype=gain.dtype)[None]  # its mean is far from 0
    with torch.no_grad():
        have = parts.norm(state).float()
        want = nn.functional.rms_norm(state.float(), gain.shape, gain.float(), eps)
    off = float((have - want).norm() / want.norm().clamp_min(1e-9))
    if not off <= NORM_TOLERANCE:
        raise UnsupportedVerifier(
            f"the final norm, a {type(parts.norm).__name__}, is no RMS norm of gain w: it is {off:.2g} off (allowed {NORM_TOLERANCE})",
            remedy="a drafter is trained on head(norm(state)) with such a norm; use a verifier that has one",
            pointer="/verifier/model",
        )


def require_numbers(name: str, values_BnX: Tensor) -> None:
    """Raise StatesNotFinite, naming the first token, unless every value of the self check's pass is a number."""
    bad = torch.nonzero(~torch.isfinite(values_BnX))
    if len(bad):
        raise StatesNotFinite(
            f"in a pass over {values_BnX.shape[1]} tokens, {name} of the verifier is NaN or infinite in "
            f"{str(values_BnX.dtype).removeprefix('torch.')}, first at token {int(bad[0, 1])}",
            remedy=FINITE_REMEDY,
            pointer=POINTER,
        )


class Probe:
    """Forward pre-hooks at three layers and at the final norm; while `on`, each pass leaves its states here."""

    def __init__(self, parts: Parts, aux_layers: tuple[int, int, int]) -> None:
        self.parts, self.aux_layers = parts, aux_layers
        self.on = False
        self._taken: dict[str, Tensor] = {}
        for layer in aux_layers:
            self._attach(parts.layers[layer], f"aux {layer}")
        self._attach(parts.norm, "final")

    def _attach(self, module: nn.Module, name: str) -> None:
        def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.on:
                self._taken[name] = args[0] if args else kwargs["hidden_states"]

        module.register_forward_pre_hook(take, with_kwargs=True)

    def take(self) -> States:
        """The last pass's states, [B, n, ...]. Raises SelfCheckFailed if a hook did not fire."""
        wanted = [*(f"aux {layer}" for layer in self.aux_layers), "final"]
        if missing := [name for name in wanted if name not in self._taken]:
            raise SelfCheckFailed(
                f"the pass left no states for {', '.join(missing)}",
                remedy="this model does not run its layers in the usual way; it cannot be captured",
            )
        taken, self._taken = self._taken, {}
        return States(torch.cat([taken[name] for name in wanted[:3]], -1), taken["final"])

    def prove(self, hidden_states: tuple[Tensor, ...], logits: Tensor) -> None:
        """Compare the last pass with what the model reported of it: `hidden_states` (N + 1, the last one normed) and `logits`.

        Raises StatesNotFinite that names the first place where a value is no number (such values equal nothing, and would
        pass for a fault of the capture), SelfCheckFailed that names the layer which differs.
        """
        states = self.take()
        told = [(f"hidden_states[{i}]", state) for i, state in enumerate(hidden_states)]
        for name, values in [*told[:-1], ("the input of the final norm", states.final), told[-1], ("logits", logits)]:
            require_numbers(name, values)
        for layer, state in zip(self.aux_layers, states.aux.chunk(3, -1), strict=True):
            if not torch.equal(state, hidden_states[layer]):
                raise SelfCheckFailed(
                    f"the input of layer {layer} differs from the model's own hidden_states[{layer}]",
                    remedy="this model numbers its layers in another way; it cannot be captured",
                )
        normed = self.parts.norm(states.final)
        if not torch.equal(normed, hidden_states[-1]):
            raise SelfCheckFailed(
                "norm(final) differs from the model's own last hidden state: `final` is not the input of the final norm",
                remedy="this model works on its last state in another way; it cannot be captured",
            )
        if not torch.allclose(self.parts.head(normed).float(), logits.float(), rtol=1e-3, atol=1e-3):
            raise SelfCheckFailed(
                "head(norm(final)) differs from the model's logits: they are scaled or capped behind the head",
                remedy="a drafter is trained on head(norm(final)); use a verifier whose logits are just that",
            )
