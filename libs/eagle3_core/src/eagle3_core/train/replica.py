"""What one rank holds of the drafter, its optimizer and how gradients of all ranks become one step.

Each rank's gradient is that of its own numerator. Their sum divided by the joint denominator is the gradient of the one
fraction over all ranks' pairs, whoever had how many, so ranks may hold unequal shares of a step, or none of it: an
empty batch has a gradient of zero, and its collectives take place.

`Replica` is the whole drafter on every rank (one GPU, or DDP); `train.sharded` keeps a share on each (FSDP2). What a
checkpoint holds is whole tensors under the same names for both, so it never depends on the number of ranks.

Shapes: K steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.step import PackedBatch, StepCounts, batch_loss
from eagle3_core.drafter.verifier_parts import Teacher
from eagle3_core.jobs.spec import Training
from eagle3_core.train.optim import AdamW, scale_and_clip
from eagle3_core.train.progress import packed
from eagle3_core.train.ranks import Ranks

Noisy = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Place:
    """Where and in what precision a rank computes."""

    device: torch.device
    dtype: torch.dtype
    """Of the products; masters and moments are float32."""
    ranks: Ranks = field(default_factory=Ranks)


class Loss(nn.Module):
    """Batch -> (numerator, the sums of its pass); the drafter's float32 weights are its parameters."""

    def __init__(self, drafter: Drafter, teacher: Teacher, objective: Objective, place: Place) -> None:
        super().__init__()
        self._frame = replace(drafter, weights={}).at(place.device, torch.float32)
        self._teacher, self._objective, self.place = teacher.to(place.device, place.dtype), objective, place
        self._attributes = {name: name.replace(".", "__") for name in drafter.weights}
        for name, weight in drafter.weights.items():
            master = weight.detach().to(place.device, torch.float32, copy=True)
            self.register_parameter(self._attributes[name], nn.Parameter(master, requires_grad=weight.requires_grad))

    def masters(self) -> dict[str, nn.Parameter]:
        """The weights by name: of a rank that holds a share, its share."""
        return {name: getattr(self, attribute) for name, attribute in self._attributes.items()}

    def forward(self, batch: PackedBatch | None, noise: Noisy | None) -> tuple[Tensor, Tensor]:
        """Numerator, and float64 [2 + 2K] (`progress.packed`), of `batch`; zeros that reach every weight without one."""
        weights, device = cast("dict[str, Tensor]", self.masters()), self.place.device
        if batch is None:
            zero = sum((w.sum() * 0.0 for w in weights.values()), torch.zeros((), device=device))
            none_K = torch.zeros(self._objective.steps, dtype=torch.long, device=device)
            return zero, packed(zero, zero.detach(), StepCounts(none_K, none_K))
        drafter = replace(self._frame, weights=weights).at(device, self.place.dtype)
        numerator, denominator, counts = batch_loss(drafter, self._teacher, batch, self._objective, noise)
        return numerator, packed(numerator, denominator, counts)


class Replica:
    """The whole drafter on this rank."""

    def __init__(
        self, drafter: Drafter, teacher: Teacher, objective: Objective, training: Training, place: Place
    ) -> None:
        """`drafter` in float32 on the CPU; it is left as it is."""
        self.ranks, self._origin = place.ranks, drafter
        self.loss = Loss(drafter, teacher, objective, place)
        self._runner = self._prepare(self.loss)
        self.masters: dict[str, nn.Parameter] = self.loss.masters()
        self.learning: dict[str, nn.Parameter] = {n: w for n, w in self.masters.items() if w.requires_grad}
        """The weights that training changes, by name."""
        self._adam, self._clip = AdamW(self.learning, training.betas, training.weight_decay), training.clip

    def learn(self, batch: PackedBatch | None, noise: Noisy | None, *, last: bool) -> Tensor:
        """One pass forward and backward; its sums. Gradients add up; the step's `last` pass shares them among ranks."""
        with self._exchanging(last):
            numerator, sums = self._runner(batch, noise)
            numerator.backward()
        return sums

    def judge(self, batch: PackedBatch | None) -> Tensor:
        """The sums of a pass that changes nothing."""
        with torch.no_grad():
            _, sums = self.loss(batch, None)
        return sums

    def update(self, denominator: Tensor, rate: float) -> Tensor:
        """Take the step at learning rate `rate`; `denominator` is all ranks'. Returns the gradient's norm, float64."""
        # DDP and FSDP2 leave the mean over ranks, not the sum.
        norm = scale_and_clip(self._gradients(), denominator / self.ranks.size, self._clip, self._joint())
        self._adam.step(rate)
        return norm

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of weights and moments, one after the other; every rank must read on to the end."""
        named = {f"weight/{name}": w for name, w in self.learning.items()} | self._adam.state()
        for name, tensor in sorted(named.items()):
            yield name, self._full(tensor)

    def restore(self, whole: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, by whatever number of ranks; only rank 0 needs to pass it."""
        found: dict[str, Tensor] = {}
        for key in self.ranks.from_first(sorted(whole)):
            kind, _, name = key.partition("/")
            found[key] = self._spread(whole.get(key), self.learning[name], scalar=kind == "step")
        with torch.no_grad():
            for name, weight in self.learning.items():
                weight.copy_(found[f"weight/{name}"])
        self._adam.restore(found)

    def drafter(self) -> Drafter:
        """The drafter as it is now, whole, in float32 on the CPU; every rank must ask."""
        return replace(self._origin, weights={name: self._full(w).cpu() for name, w in self.masters.items()})

    # -- what sharding changes

    def _prepare(self, loss: Loss) -> nn.Module:
        return loss if self.ranks.size == 1 else DistributedDataParallel(loss, gradient_as_bucket_view=True)

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        if isinstance(self._runner, DistributedDataParallel) and not last:
            return self._runner.no_sync()
        return nullcontext()

    def _gradients(self) -> list[Tensor]:
        return [w.grad for w in self.learning.values() if w.grad is not None]

    def _joint(self) -> Callable[[Tensor], Tensor] | None:
        """How squares of norms add up over ranks; None where every rank has whole gradients."""
        return None

    def _full(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def _spread(self, whole: Tensor | None, weight: Tensor, *, scalar: bool) -> Tensor:
        """Rank 0's `whole` tensor on every rank, lying as `weight` does, or as it is where it is a scalar."""
        here = _room(weight, scalar) if whole is None else whole.to(weight.device)
        if self.ranks.size > 1:
            torch.distributed.broadcast(here, src=0)
        return here


def _room(weight: Tensor, scalar: bool) -> Tensor:
    return torch.empty(() if scalar else weight.shape, dtype=torch.float32, device=weight.device)


def replica(
    drafter: Drafter, teacher: Teacher, objective: Objective, training: Training, place: Place,
    sharding: Literal["ddp", "fsdp2"],
) -> Replica:  # fmt: skip
    """What a rank at `place` holds: a share under `fsdp2`, where there are others to hold the rest."""
    if place.ranks.size > 1 and sharding == "fsdp2":
        from eagle3_core.train.sharded import ShardedReplica  # two seconds of imports that nobody else needs

        return ShardedReplica(drafter, teacher, objective, training, place)
    return Replica(drafter, teacher, objective, training, place)
