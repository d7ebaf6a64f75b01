"""What the captured states must equal: those of Hugging Face's own implementation of the same checkpoint.

Shapes: T tokens, H hidden size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle3_core.objects.location import store_at
from eagle3_core.verifier.receipt import Receipt


class Reference:
    """A checkpoint in Hugging Face's transformers."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._prenorm: list[Tensor] = []
        self.model.model.norm.register_forward_pre_hook(lambda module, given: self._prenorm.append(given[0]))

    @torch.no_grad()
    def states(self, ids: list[int]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Inputs of every layer [T, H], the state before the final norm [T, H], and behind it."""
        self._prenorm.clear()
        out = self.model(torch.tensor([ids]), output_hidden_states=True)
        layers = [h[0].float() for h in out.hidden_states[:-1]]
        return layers, self._prenorm[0][0].float(), out.hidden_states[-1][0].float()


def stored(sink: str, receipt: Receipt) -> dict[str, Tensor]:
    """The tensors that `receipt` names."""
    return load(store_at(sink).get_bytes(receipt.key))


def cosine(a_TH: Tensor, b_TH: Tensor) -> float:
    """Least cosine over the tokens."""
    return float(torch.nn.functional.cosine_similarity(a_TH.double(), b_TH.double(), dim=-1).min())
