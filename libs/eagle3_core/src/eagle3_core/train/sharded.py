"""The drafter in shares: FSDP2 keeps on each rank its part of weights, gradients and moments.

For a pass the weights are gathered in the precision of the products, afterwards gradients are reduced in float32 to
the rank that owns them. A rank then holds 16 bytes a weight / ranks and 2 while it computes, instead of 18.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from eagle3_core.train.replica import Loss, Replica


class ShardedReplica(Replica):
    """This rank's share of the drafter."""

    def _prepare(self, loss: Loss) -> nn.Module:
        place = loss.place
        policy = MixedPrecisionPolicy(param_dtype=place.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        mesh = init_device_mesh(place.device.type, (self.ranks.size,))
        return cast("nn.Module", fully_shard(loss, mesh=mesh, mp_policy=policy, reshard_after_forward=False))

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        cast("Any", self._runner).set_requires_gradient_sync(last)
        return nullcontext()

    def _gradients(self) -> list[Tensor]:
        return [_share(w.grad) for w in self.learning.values() if w.grad is not None]

    def _joint(self) -> Callable[[Tensor], Tensor] | None:
        return self.ranks.add_up

    def _full(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()

    def _spread(self, whole: Tensor | None, weight: Tensor, *, scalar: bool) -> Tensor:
        if scalar or not isinstance(weight, DTensor):
            return super()._spread(whole, weight, scalar=scalar)
        here = torch.empty(weight.shape, device=weight.device) if whole is None else whole.to(weight.device)
        return distribute_tensor(here, weight.device_mesh, weight.placements)


def _share(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
