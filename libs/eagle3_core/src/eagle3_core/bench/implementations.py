"""The implementations that are compared: each does one training step of the same work and can show its gradient.

ours          `drafter.step`, with the objective and the label rule of the peer that it stands beside
speculators   its own `Eagle3DraftModel`, forward and backward; its head is frozen, as it ships
specforge     `OnlineEagle3Model` of SpecForge, where it is installed; its head is trained, as it ships

On a GPU a step includes AdamW and the clip, in the precision in which each ships (ours: bf16 products, float32 masters);
on a CPU it is forward and backward in float32, so that gradients can be compared to the last digits.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from eagle3_core.bench.cases import Work
from eagle3_core.drafter.build import speculators_module
from eagle3_core.drafter.chains import LabelRule
from eagle3_core.drafter.flat import FlatWeights
from eagle3_core.drafter.losses import LossName, Objective
from eagle3_core.drafter.rows import lay_out
from eagle3_core.drafter.step import batch_loss
from eagle3_core.drafter.testing import MemorySamples
from eagle3_core.train.muon import OPTIMIZERS
from eagle3_core.train.optim import clipped
from eagle3_core.train.prefetch import tensors_of

RATE = 1e-4
OptimizerName = Literal["adamw", "muon"]


class Implementation(Protocol):
    """One training step, again and again."""

    name: str

    def step(self) -> Tensor:
        """Forward, backward and (on a GPU) the optimizer; the loss, not read."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """By the drafter's names, after `step` without an optimizer."""
        ...


class Ours:
    """This library."""

    def __init__(
        self, work: Work, device: torch.device, *, loss: LossName, rule: LabelRule, label: str = "",
        optimizer: OptimizerName | None = None,
    ) -> None:  # fmt: skip
        """`optimizer`: AdamW on a GPU and none on a CPU unless given."""
        self.name = f"aerie{label}"
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._flat = FlatWeights(work.drafter, device, dtype)
        self._teacher = work.teacher.to(device, dtype)
        self._objective = Objective(work.case.steps, loss)
        batch = work.batch(rule)
        batch = replace(batch, **{name: tensor.to(device) for name, tensor in tensors_of(batch)})
        self._batch = batch
        chosen = optimizer or ("adamw" if device.type == "cuda" else None)
        self._optimizer = OPTIMIZERS[chosen](self._flat, (0.9, 0.95), 0.0) if chosen else None

    def step(self) -> Tensor:
        """The plan is laid out anew, as for every batch of a run."""
        self._flat.clear()
        batch = replace(self._batch, layout=lay_out(self._batch.plan, self._batch.offsets))
        numerator, denominator, _ = batch_loss(self._flat.drafter, self._teacher, batch, self._objective)
        # speculators' loss is a sum over steps of means, ours one mean: K times as much where steps have as many pairs.
        loss = numerator * (self._objective.steps / denominator)
        if self._optimizer is None:
            loss.backward()
            return loss.detach()
        numerator.backward()
        gradient_N = self._flat.gradient()
        _, scale = clipped(torch.linalg.vector_norm(gradient_N, dtype=torch.float32).double(), denominator, 1.0)
        self._optimizer.step(gradient_N, scale, RATE)
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """See `Implementation`."""
        named = self._flat.drafter.weights
        return {name: w.grad for name, w in named.items() if w.grad is not None}


class Speculators:
    """speculators' own model on the batch that its own collator would make."""

    def __init__(self, work: Work, device: torch.device, attention: str, *, compiled: bool = True) -> None:
        """`compiled`: with its forward pass compiled, as it ships on a GPU; else only its flex attention is."""
        from speculators.losses import resolve_loss_config

        if not compiled:
            _uncompiled()
        self.name = (
            f"speculators ({attention}{', forward not compiled' if device.type == 'cuda' and not _compiles() else ''})"
        )
        self._cuda = device.type == "cuda"
        self._module = peer_module(work, device, attention)
        self._batch = {name: tensor.to(device) for name, tensor in peer_batch(work.samples).items()}
        self._loss = resolve_loss_config("kl_div", "fused" if self._cuda else "eager")
        trained = [p for p in self._module.parameters() if p.requires_grad]
        self._adam = torch.optim.AdamW(trained, lr=RATE, fused=True) if self._cuda else None

    def step(self) -> Tensor:
        """In the order of operations of that library's trainer."""
        self._module.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self._cuda):
            _, loss, _ = self._module(**self._batch, ttt_steps=self._module.steps, loss_config=self._loss)
        loss.backward()
        if self._adam is not None:
            torch.nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
            self._adam.step()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """See `Implementation`."""
        return {name: p.grad for name, p in self._module.named_parameters() if p.grad is not None}


def _compiles() -> bool:
    """Whether that library's forward pass is compiled in this process."""
    from speculators.models.eagle3 import Eagle3DraftModel

    return hasattr(Eagle3DraftModel.forward, "_torchdynamo_orig_callable")


def _uncompiled() -> None:
    """Take the compiler off that library's forward pass: torch 2.11 cannot compile it. Its attention stays compiled."""
    import speculators.models.attention as attention
    from speculators.models.eagle3 import Eagle3DraftModel
    from torch.nn.attention.flex_attention import flex_attention

    inner = getattr(Eagle3DraftModel.forward, "_torchdynamo_orig_callable", None)
    if inner is not None:
        Eagle3DraftModel.forward = inner
    attention.flex_attention = torch.compile(flex_attention)  # pyright: ignore[reportPrivateImportUsage]


def peer_module(work: Work, device: torch.device, attention: str) -> Any:
    """That library's module with the work's weights."""
    drafter = work.drafter
    with warnings.catch_warnings(), torch.device(device):
        warnings.simplefilter("ignore")
        module = speculators_module(drafter.config, None, seed=1, attention=attention)
    module = module.to(device)
    named = dict(module.named_parameters())
    with torch.no_grad():
        for name, weight in drafter.weights.items():
            named[name].copy_(weight)
        module.embed_tokens.weight.copy_(drafter.embedding_VH)
        module.verifier_lm_head.weight.copy_(work.teacher.head_VdH)
        module.verifier_norm.weight.copy_(work.teacher.norm_H)
    module.load_vocab_mappings(drafter.t2d_V, drafter.d2t_Vd)
    module.lm_head.weight.requires_grad_(False)
    module.steps = work.case.steps
    return module


def peer_batch(samples: MemorySamples) -> dict[str, Tensor]:
    """The one sample of `samples`, shifted by that library's own function and filled up to T with a token of no document.

    Its collator fills batches up too; its flex attention fails on a length that is no multiple of a block.
    """
    from speculators.models.eagle3.data import shift_batch

    (sample,) = samples.samples
    length, device = len(sample.input_ids), sample.aux.device
    final = torch.zeros(length, sample.final.shape[1], dtype=sample.final.dtype, device=device)
    final[sample.final_index.long().to(device)] = sample.final
    item = shift_batch(
        {
            "input_ids": sample.input_ids.long(), "hidden_states": sample.aux, "verifier_last_hidden_states": final,
            "loss_mask": sample.loss_mask.bool().to(device), "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length, device=device),
        }
    )  # fmt: skip
    item.pop("lengths")
    item["document_ids"] = torch.zeros(length - 1, dtype=torch.long, device=device)
    filled = {name: torch.cat([tensor, torch.zeros_like(tensor[:1])]) for name, tensor in item.items()}
    filled["document_ids"][-1] = -1
    return {name: tensor[None] for name, tensor in filled.items()}
