"""The drafter in shares: FSDP2 keeps on each rank its part of weights, gradients and moments.

For a pass the weights are gathered in the precision of the products, afterwards gradients are reduced in float32 to
the rank that owns them. A rank then holds 16 bytes a weight / ranks and 4 while it computes, instead of 16 to 18.
FSDP2 leaves the mean of the ranks' gradients, so the step divides by the joint denominator / ranks.

Shapes: K steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.step import PackedBatch, batch_loss
from eagle3_core.drafter.verifier_parts import Teacher
from eagle3_core.jobs.spec import Training
from eagle3_core.train.memory import Demand
from eagle3_core.train.optim import AdamW, clipped
from eagle3_core.train.progress import packed
from eagle3_core.train.replica import Place


class _Loss(nn.Module):
    """Batch -> (numerator, the sums of its pass); the drafter's float32 weights are its parameters."""

    def __init__(self, drafter: Drafter, teacher: Teacher, objective: Objective, place: Place, demand: Demand) -> None:
        super().__init__()
        self._demand = demand
        self._frame = replace(drafter, weights={}).at(place.device, torch.float32)
        self._teacher, self._objective, self._place = teacher.to(place.device, place.dtype), objective, place
        self._attributes = {name: name.replace(".", "__") for name in drafter.weights}
        for name, weight in drafter.weights.items():
            master = weight.detach().to(place.device, torch.float32, copy=True)
            self.register_parameter(self._attributes[name], nn.Parameter(master, requires_grad=weight.requires_grad))

    def weights(self) -> dict[str, nn.Parameter]:
        """By name: between passes this rank's shares, in a pass the gathered ones."""
        return {name: getattr(self, attribute) for name, attribute in self._attributes.items()}

    def forward(self, batch: PackedBatch | None) -> tuple[Tensor, Tensor]:
        """Numerator, and float64 [2 + 2K] (`progress.packed`), of `batch`; zeros that reach every weight without one."""
        weights, device = cast("dict[str, Tensor]", self.weights()), self._place.device
        none = torch.zeros(2 + 2 * self._objective.steps, dtype=torch.float64, device=device)
        if batch is None:
            return sum((w.sum() * 0.0 for w in weights.values()), torch.zeros((), device=device)), none
        drafter = replace(self._frame, weights=weights).at(device, self._place.dtype)
        pieces = self._place.pieces(batch, self._demand)
        if len(pieces) == 1:
            numerator, denominator, counts = batch_loss(drafter, self._teacher, batch, self._objective)
            return numerator, packed(numerator, denominator, counts)
        return self._in_pieces(drafter, pieces, none)

    def _in_pieces(self, drafter: Drafter, pieces: list[PackedBatch], sums: Tensor) -> tuple[Tensor, Tensor]:
        """The same slice by slice, each backward at once: collectives see one pass, whatever a rank's slices are."""
        learning = [w for w in drafter.weights.values() if w.requires_grad]
        gradients: list[Tensor] = []
        for piece in pieces:
            numerator, denominator, counts = batch_loss(drafter, self._teacher, piece, self._objective)
            sums += packed(numerator, denominator, counts)
            if numerator.requires_grad:
                found = torch.autograd.grad(numerator, learning)
                gradients = [a.add_(b) for a, b in zip(gradients, found, strict=True)] or [g.float() for g in found]
        total = sums[0].float()
        return (_Known.apply(total, gradients, *learning) if gradients else total), sums


class _Known(torch.autograd.Function):
    """A value whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = [g.to(w.dtype) for g, w in zip(gradients, weights, strict=True)]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *d: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *[g.mul_(d[0]) for g in ctx.gradients])


class ShardedReplica:
    """This rank's share of the drafter; see `replica.Held` for what its methods do."""

    def __init__(
        self, drafter: Drafter, teacher: Teacher, objective: Objective, training: Training, place: Place
    ) -> None:
        """`drafter` in float32 on the CPU; it is left as it is."""
        self._origin, self._ranks, self._clip = drafter, place.ranks, training.clip
        policy = MixedPrecisionPolicy(param_dtype=place.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        mesh = init_device_mesh(place.device.type, (place.ranks.size,))
        loss = _Loss(drafter, teacher, objective, place, place.demand(drafter.config, training))
        self._loss: Any = fully_shard(loss, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self._masters = loss.weights()
        self._learning = {name: w for name, w in self._masters.items() if w.requires_grad}
        self._adam = AdamW(self._learning, training.betas, training.weight_decay)

    def learn(self, batch: PackedBatch | None, *, last: bool) -> Tensor:
        """One pass; the step's `last` one reduces the gradients."""
        self._loss.set_requires_gradient_sync(last)
        numerator, sums = self._loss(batch)
        numerator.backward()
        return sums

    def judge(self, batch: PackedBatch | None) -> Tensor:
        """A pass that changes nothing."""
        with torch.no_grad():
            _, sums = self._loss(batch)
        return sums

    def update(self, denominator: Tensor, rate: float) -> Tensor:
        """Take the step."""
        gradients = [_local(w.grad) for w in self._learning.values() if w.grad is not None]
        own = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])).double()
        summed = self._ranks.add_up(own.square()).sqrt()
        norm, scale = clipped(summed, denominator / self._ranks.size, self._clip)
        for gradient in gradients:
            gradient.mul_(scale)
        self._adam.step(rate)
        return norm

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, one gathered after the other; every rank must read on to the end."""
        named: dict[str, Tensor] = {f"weight/{name}": w for name, w in self._learning.items()} | self._adam.state()
        yield from ((name, _whole(tensor)) for name, tensor in sorted(named.items()))

    def restore(self, whole: Mapping[str, Tensor]) -> None:
        """Take over a checkpoint."""
        found: dict[str, Tensor] = {}
        for key in self._ranks.from_first(sorted(whole)):
            kind, _, name = key.partition("/")
            like = self._learning[name]
            shape = () if kind == "step" else like.shape
            tensor = whole[key].to(like.device) if key in whole else torch.empty(shape, device=like.device)
            found[key] = self._ranks.hand_out(tensor) if kind == "step" else _like(tensor, like)
        with torch.no_grad():
            for name, weight in self._learning.items():
                weight.copy_(found[f"weight/{name}"])
        self._adam.restore(found)

    def drafter(self) -> Drafter:
        """The whole drafter; every rank must ask."""
        return replace(self._origin, weights={name: _whole(w).cpu() for name, w in self._masters.items()})


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _like(whole: Tensor, weight: Tensor) -> Tensor:
    """Rank 0's `whole` in shares as `weight` is."""
    assert isinstance(weight, DTensor)
    return distribute_tensor(whole, weight.device_mesh, weight.placements)
