"""The processes that train together: their number, this one's rank, and the decisions that all must share.

Everything that decides the course of a run (sums, stops, checkpoints) goes through here, so that all ranks always decide
alike: if one rank left, the others would hang in their next collective. A single process is a group of one and communicates
with nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process's place among `size`."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all: it reports, and writes what is stored."""
        return self.rank == 0

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over ranks, in place, without waiting for it on a GPU."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def begin_adding_up(self, tensor: Tensor) -> Callable[[], object]:
        """The sum of `tensor` over ranks, in place and beside what is computed next; what it returns waits for it."""
        work = dist.all_reduce(tensor, async_op=True) if self.size > 1 else None
        return work.wait if work is not None else lambda: None

    def hand_out(self, tensor: Tensor) -> Tensor:
        """Rank 0's `tensor` on every rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def any(self, here: bool, device: torch.device) -> bool:
        """Whether `here` holds on any rank; waits for all of them."""
        if self.size == 1:
            return here
        return bool(self.add_up(torch.full((1,), float(here), device=device)).item())

    def from_first(self, value: Any) -> Any:
        """What rank 0 passed (small, picklable); the others pass anything."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def wait(self) -> None:
        """Return when every rank has come here."""
        if self.size > 1:
            dist.barrier()


def join(device: str) -> tuple[Ranks, torch.device]:
    """Meet the other processes that torchrun started, over NCCL on GPUs and gloo on CPUs; call `leave` at the end."""
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if device == "cpu":
        dist.init_process_group("gloo")
        return Ranks(rank, size), torch.device("cpu")
    place = torch.device("cuda", local)
    torch.cuda.set_device(place)
    dist.init_process_group("nccl", device_id=place)
    return Ranks(rank, size), place


def leave() -> None:
    """Part from the others, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()
