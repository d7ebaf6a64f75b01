"""The few tensors that a drafter takes from its verifier, read one by one out of its safetensors.

A verifier may have hundreds of gigabytes; a drafter needs its embedding, its final norm, the head's rows of the
draft vocabulary and, to start from, its last layer. Names are matched by their end, the shortest match first, so
`language_model.model.embed_tokens.weight` of a multimodal checkpoint is found like `model.embed_tokens.weight`.

Shapes: V verifier vocabulary, Vd draft vocabulary, H hidden size, N rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from eagle3_core.drafter.config import Undraftable, read_text_config
from eagle3_core.verifier.folder import VerifierWeights, refusal

EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
ROWS_AT_ONCE = 4096
"""Rows of a tensor that are looked at together: what is made of them lies beside a tensor that may have gigabytes."""


class VerifierParts:
    """A verifier's checkpoint folder, open for single tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text_config = read_text_config(folder)
        self._file_of = _weight_map(folder)

    def find(self, ending: str) -> str | None:
        """Full name of the tensor whose name is or ends with `.ending`; the shortest where several do."""
        matches = [name for name in self._file_of if name == ending or name.endswith("." + ending)]
        return min(matches, key=len) if matches else None

    def norm(self) -> Tensor:
        """[H] gain of the final norm, as stored: it lies beside the embedding, whatever the language model is nested in."""
        embedding = self.find(EMBEDDING)
        beside = (embedding or "").removesuffix(EMBEDDING) + "norm.weight"
        return self.tensor(beside if beside in self._file_of else FINAL_NORM)

    def tensor(self, ending: str) -> Tensor:
        """The tensor whose name ends with `ending`, as stored. Raises Undraftable, and VerifierWeights for NaN.

        A copy: a mapped tensor would change with its file, after the file was checked.
        """
        name = self.find(ending)
        if name is None:
            raise Undraftable(
                f"{self.folder} holds no tensor ending with {ending}",
                remedy="use a checkpoint whose safetensors hold embed_tokens, norm and lm_head (or a tied embedding)",
            )
        with safe_open(self.folder / self._file_of[name], framework="pt", device="cpu") as file:
            tensor = file.get_tensor(name).clone()
        _require_finite(f"{name} in {self.folder / self._file_of[name]}", tensor)
        return tensor

    def embedding(self) -> Tensor:
        """[V, H], as stored."""
        embedding_VH = self.tensor(EMBEDDING)
        want = (self.text_config["vocab_size"], self.text_config["hidden_size"])
        if tuple(embedding_VH.shape) != want:
            raise Undraftable(
                f"the embedding has shape {tuple(embedding_VH.shape)}, the verifier's config says {want}",
                remedy="repair the checkpoint: config.json and safetensors must come from one model",
            )
        return embedding_VH

    def head(self) -> Tensor:
        """[V, H], as stored: `lm_head`, or the embedding where config or checkpoint tie the two."""
        tied = self.text_config.get("tie_word_embeddings")
        if tied or (tied is None and self.find(HEAD) is None):
            return self.embedding()
        return self.tensor(HEAD)

    def last_layer(self) -> dict[str, Tensor]:
        """Tensors of the last decoder layer by their name within it, as stored."""
        last = f"layers.{int(self.text_config['num_hidden_layers']) - 1}."
        anchor = self.find(last + "input_layernorm.weight")
        if anchor is None:
            return {}
        prefix = anchor.removesuffix("input_layernorm.weight")
        names = [name for name in self._file_of if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.tensor(name) for name in sorted(names)}


def _require_finite(name: str, tensor: Tensor) -> None:
    """Raise VerifierWeights, naming the first bad row, unless every element is a number in float32.

    The row of a token that no sample holds never enters a pass, so nothing else would notice it before it is served.
    """
    for start in range(0, len(tensor), ROWS_AT_ONCE):
        finite = torch.isfinite(tensor[start : start + ROWS_AT_ONCE].float())
        if not bool(finite.all()):
            row = start + int(torch.nonzero(~finite)[0, 0])
            raise refusal(
                VerifierWeights,
                f"{name} is NaN or infinite, first in row {row} of {len(tensor)}",
                "download the checkpoint again, or write it again without such values",
            )


def _weight_map(folder: Path) -> dict[str, str]:
    """Which safetensors file of `folder` holds which tensor."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return dict(json.loads(index.read_text())["weight_map"])
    if single.is_file():
        with safe_open(single, framework="pt", device="cpu") as file:
            return dict.fromkeys(file.keys(), single.name)
    raise Undraftable(
        f"{folder} holds neither model.safetensors nor model.safetensors.index.json",
        remedy="save the verifier as safetensors (save_pretrained does)",
    )


@dataclass(frozen=True)
class Teacher:
    """The verifier's output distribution, restricted to the draft vocabulary and renormalised over it."""

    norm_H: Tensor
    """Gain of the final RMS norm."""
    head_VdH: Tensor
    """Rows of the verifier's head, in draft order."""
    eps: float
    final: Literal["pre", "post"]
    """Whether stored states lie before or after the final norm (capture contract)."""

    @classmethod
    def read(cls, parts: VerifierParts, t2d_V: Tensor, final: Literal["pre", "post"]) -> Teacher:
        """From the verifier's files, in float32. `t2d_V`: bool [V], true for tokens of the draft vocabulary."""
        head_VdH = parts.head()[t2d_V].float()
        return cls(parts.norm().float(), head_VdH, float(parts.text_config.get("rms_norm_eps", 1e-6)), final)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Teacher:
        """The same on `device` in `dtype`."""
        return Teacher(self.norm_H.to(device, dtype), self.head_VdH.to(device, dtype), self.eps, self.final)

    @torch.no_grad()
    def logits(self, final_NH: Tensor) -> Tensor:
        """[N, Vd] logits of stored final states [N, H], in the teacher's dtype."""
        state_NH = final_NH.to(self.head_VdH.dtype)
        if self.final == "pre":
            state_NH = functional.rms_norm(state_NH, self.norm_H.shape, self.norm_H, self.eps)
        return functional.linear(state_NH, self.head_VdH)

    @torch.no_grad()
    def probabilities(self, final_NH: Tensor) -> Tensor:
        """[N, Vd] float32 (float64 of a teacher in float64) distribution of stored final states [N, H]."""
        logits_NVd = self.logits(final_NH)
        return logits_NVd.softmax(-1, dtype=torch.promote_types(logits_NVd.dtype, torch.float32))
