"""What one rank holds of the drafter, its optimizer, and how the gradients of all ranks become one step.

Each rank's gradient is that of its own numerator. Their sum divided by the joint denominator is the gradient of the one
fraction over all ranks' pairs, whoever had how many, so ranks may hold unequal shares of a step, or none of it: where
there is no batch the gradient is zero, and its collectives take place.

`Replica` holds the whole drafter on every rank: one process, or data parallel (DDP). A weight is used by every step of a
chain, so its gradient is whole only late in the backward pass: the head's before the chains are walked backward, the
layer's when they are, the rest at the very end (`flat.portions_of`). Each portion is added up over ranks while the next is
computed, in the dtype of the products. `train.sharded` keeps a share of weights and moments on each rank (FSDP2).

What a checkpoint holds is whole tensors under the same names for both, so it never depends on the number of ranks.

Shapes: K steps, N elements of all trained weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.flat import FlatWeights
from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.step import PackedBatch, batch_loss
from eagle3_core.drafter.verifier_parts import Teacher
from eagle3_core.jobs.spec import Training
from eagle3_core.train.landing import Landing
from eagle3_core.train.memory import Demand, Rows
from eagle3_core.train.muon import OPTIMIZERS
from eagle3_core.train.optim import clipped
from eagle3_core.train.progress import packed
from eagle3_core.train.ranks import Ranks
from eagle3_core.train.slices import sliced


@dataclass(frozen=True)
class Place:
    """Where and in what precision a rank computes."""

    device: torch.device
    dtype: torch.dtype
    """Of the products; masters and moments are float32."""
    ranks: Ranks = field(default_factory=Ranks)
    room: int | None = None
    """Bytes of memory that may be planned with; None = no limit."""

    def demand(self, config: DrafterConfig, training: Training) -> Demand:
        """What training takes here."""
        return Demand(
            config, 4 if self.dtype == torch.float32 else 2, training.train_lm_head, ranks=self.ranks.size,
            sharded=training.sharding == "fsdp2", cuda=self.device.type == "cuda",
        )  # fmt: skip

    def pieces(self, batch: PackedBatch, demand: Demand) -> list[PackedBatch]:
        """`batch` in as few slices as fit into the room."""
        plan = batch.plan
        rows = Rows(len(batch.input_ids_T), len(plan.start_M), int(plan.depth_M.sum()))
        return sliced(batch, demand.slices(rows, self.room))


class Held(Protocol):
    """A drafter in training, as one rank sees it. Every rank calls the same methods in the same order."""

    def learn(self, batch: PackedBatch | None, *, last: bool) -> Tensor:
        """One pass forward and backward; its sums (`progress.packed`). Gradients add up until the step's `last` pass."""
        ...

    def judge(self, batch: PackedBatch | None) -> Tensor:
        """The sums of a pass that changes nothing."""
        ...

    def update(self, denominator: Tensor, rate: float) -> Tensor:
        """Take the step at learning rate `rate`; `denominator` is all ranks'. Returns the gradient's norm, float64."""
        ...

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Weights and moments, whole, as `weight/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`, one at a time."""
        ...

    def restore(self, whole: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, from whatever number of ranks; only rank 0 needs to pass it."""
        ...

    def drafter(self) -> Drafter:
        """The drafter as it is now, whole, in float32 on the CPU."""
        ...


class Replica:
    """The whole drafter on this rank."""

    def __init__(
        self, drafter: Drafter, teacher: Teacher, objective: Objective, training: Training, place: Place
    ) -> None:
        """`drafter` in float32 on the CPU; it is left as it is."""
        self._origin, self._objective, self._ranks, self._clip = drafter, objective, place.ranks, training.clip
        self._teacher = teacher.to(place.device, place.dtype)
        self._flat = FlatWeights(drafter, place.device, place.dtype)
        self._optimizer = OPTIMIZERS[training.optimizer](self._flat, training.betas, training.weight_decay)
        self._place, self._demand = place, place.demand(drafter.config, training)
        self._landing = Landing(self._flat.masters())
        self._gradient_N: Tensor | None = None
        self._passes = 0
        self._waits: list[Callable[[], object]] = []
        self._summed_storage = 0

    def learn(self, batch: PackedBatch | None, *, last: bool) -> Tensor:
        """See `Held`. The gradient of a step's only pass is taken as it is; of several, they are added in float32."""
        self._passes += 1
        sums = self._nothing()
        pieces = [] if batch is None else self._place.pieces(batch, self._demand)
        beside = self._add_up_soon if last and self._passes == len(pieces) == 1 and self._ranks.size > 1 else None
        for piece in pieces:
            numerator, denominator, counts = batch_loss(
                self._flat.drafter, self._teacher, piece, self._objective, tell=beside
            )
            numerator.backward()
            gradient_N = self._flat.gradient()
            if self._waits and gradient_N.untyped_storage().data_ptr() != self._summed_storage:
                raise RuntimeError("autograd copied the gradient while the ranks' sum of it was being made")
            self._add(gradient_N)
            self._flat.clear()
            sums += packed(numerator, denominator, counts)
        if not pieces:
            self._add(torch.zeros_like(self._flat.compute_N))
        if last:
            self._add_up()
        return sums

    def judge(self, batch: PackedBatch | None) -> Tensor:
        """See `Held`."""
        sums = self._nothing()
        with torch.no_grad():
            for piece in [] if batch is None else self._place.pieces(batch, self._demand):
                sums += packed(*batch_loss(self._flat.drafter, self._teacher, piece, self._objective))
        return sums

    def update(self, denominator: Tensor, rate: float) -> Tensor:
        """See `Held`."""
        gradient_N = self._gradient_N
        assert gradient_N is not None
        for wait in self._waits:
            wait()
        self._gradient_N, self._passes = None, 0
        self._waits.clear()
        summed = torch.linalg.vector_norm(gradient_N, dtype=torch.float32).double()
        norm, scale = clipped(summed, denominator, self._clip)
        self._optimizer.step(gradient_N, scale, rate)
        return norm

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """See `Held`."""
        for kind, values_N in (("weight", self._flat.master_N), *self._optimizer.moments().items()):
            yield from ((f"{kind}/{name}", slot.of(values_N)) for name, slot in self._flat.slots.items())
        yield from ((f"step/{name}", self._optimizer.count) for name in self._flat.slots)

    def restore(self, whole: Mapping[str, Tensor]) -> None:
        """See `Held`."""
        for kind, values_N in (("weight", self._flat.master_N), *self._optimizer.moments().items()):
            if self._ranks.first:
                for name, slot in self._flat.slots.items():
                    slot.of(values_N).copy_(whole[f"{kind}/{name}"])
            self._ranks.hand_out(values_N)
        self._flat.compute_N.copy_(self._flat.master_N)
        self._optimizer.begin_at(self._ranks.from_first(_steps(whole)))

    def drafter(self) -> Drafter:
        """See `Held`."""
        trained = self._landing.brought(self._flat.masters())
        kept = {name: weight.detach() for name, weight in self._origin.weights.items()}
        return replace(self._origin, weights=kept | trained)

    def _add_up_soon(self, portion: Tensor) -> None:
        """Begin to add up what the backward pass has ended."""
        self._summed_storage = portion.untyped_storage().data_ptr()
        self._waits.append(self._ranks.begin_adding_up(portion))

    def _add_up(self) -> None:
        """Begin to add up what is left. All ranks do it here, before any other exchange, and in the same order: also
        those whose pass had no chains, or was computed in slices."""
        gradient_N = self._gradient_N
        assert gradient_N is not None
        if self._ranks.size == 1 or self._waits:
            return
        if self._passes > 1:
            self._add_up_soon(gradient_N)
            return
        self._gradient_N = gradient_N = gradient_N.to(self._flat.compute_N.dtype)
        for portion in self._flat.portions:
            for part in portion:
                self._add_up_soon(gradient_N[part])

    def _add(self, gradient_N: Tensor) -> None:
        before = self._gradient_N
        self._gradient_N = gradient_N if before is None else before.float().add_(gradient_N)

    def _nothing(self) -> Tensor:
        return torch.zeros(2 + 2 * self._objective.steps, dtype=torch.float64, device=self._flat.master_N.device)


def _steps(whole: Mapping[str, Tensor]) -> int:
    """Optimizer steps behind a checkpoint's moments; they are the same for all weights."""
    return next((int(value) for key, value in whole.items() if key.startswith("step/")), 0)


def hold(drafter: Drafter, teacher: Teacher, objective: Objective, training: Training, place: Place) -> Held:
    """What a rank at `place` holds: a share with `sharding: fsdp2`, where there are others to hold the rest."""
    if place.ranks.size > 1 and training.sharding == "fsdp2":
        from eagle3_core.train.sharded import ShardedReplica  # two seconds of imports that nobody else needs

        return ShardedReplica(drafter, teacher, objective, training, place)
    return Replica(drafter, teacher, objective, training, place)
