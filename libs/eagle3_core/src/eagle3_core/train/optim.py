"""AdamW on float32 masters, the course of the learning rate, and the clip: all pure in the number of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from eagle3_core.drafter.flat import FlatWeights
from eagle3_core.drafter.operations import has_kernels

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(
    step: int,
    total: int,
    *,
    peak: float,
    schedule: Literal["cosine", "linear", "constant"],
    warmup_ratio: float,
    min_ratio: float,
) -> float:
    """The rate of optimizer step `step` (from 0) of `total`.

    It rises linearly to `peak` in the first ceil(warmup_ratio x total) steps (the first step already moves), then falls
    to `min_ratio` x peak, which the step behind the last one would have.
    """
    warmup = math.ceil(warmup_ratio * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    done = (step - warmup) / max(1, total - warmup)
    share = 0.5 * (1.0 + math.cos(math.pi * done)) if schedule == "cosine" else 1.0 - done
    return peak * (min_ratio + (1.0 - min_ratio) * share)


def clipped(summed: Tensor, denominator: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """(norm, scale): the gradient's L2 norm before clipping, and what its sum is to be multiplied with.

    `summed` is the norm of the sum of all numerators' gradients. Dividing it once by their joint `denominator` gives
    the gradient of the one fraction, so accumulation is exact; then the norm is brought down to at most `limit`. Float64
    scalars on the gradient's device: nothing here waits for it. A norm that is no number gives no scale that is one.
    """
    over = denominator.double()
    norm = summed / over
    return norm, torch.where(norm > 0, limit / norm, 1.0).clamp(max=1.0) / over


class AdamW:
    """torch's AdamW over named parameters, with its state as plain tensors by name."""

    def __init__(self, parameters: Mapping[str, Tensor], betas: tuple[float, float], weight_decay: float) -> None:
        self._parameters = dict(parameters)
        self._adam = torch.optim.AdamW(
            self._parameters.values(), lr=0.0, betas=betas, weight_decay=weight_decay, fused=True
        )

    def step(self, rate: float) -> None:
        """One update at learning rate `rate`; gradients are cleared."""
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts, float32, as `MOMENT/NAME` and `step/NAME`; empty before the first step."""
        return {
            f"{kind}/{name}": value
            for name, parameter in self._parameters.items()
            for kind, value in self._adam.state[parameter].items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state()` gave; moments as spread over ranks as their parameters are."""
        for name, parameter in self._parameters.items():
            if f"step/{name}" not in state:
                continue
            self._adam.state[parameter] = {
                "step": state[f"step/{name}"].to(parameter.device, copy=True),
                **{kind: state[f"{kind}/{name}"].to(parameter.device, copy=True) for kind in MOMENTS},
            }


class FlatAdamW:
    """The same over flat memory (`drafter.flat`): one kernel on a GPU that has it, torch's own step elsewhere."""

    def __init__(
        self, flat: FlatWeights, betas: tuple[float, float], weight_decay: float, parts: Sequence[slice] | None = None
    ) -> None:
        """`parts`: the ranges that it steps, all of the memory unless given."""
        self._flat, self._betas, self._decay = flat, betas, weight_decay
        self._m_N, self._v_N = torch.zeros_like(flat.master_N), torch.zeros_like(flat.master_N)
        self.count = torch.zeros((), device="cpu")
        """Steps taken."""
        self._kernel = has_kernels(flat.master_N.device)
        self._parts = [slice(0, len(flat.master_N))] if parts is None else list(parts)
        self._masters = [flat.master_N[part] for part in self._parts]
        self._adam = torch.optim.AdamW(self._masters, lr=0.0, betas=betas, weight_decay=weight_decay, fused=True)
        for part, master in zip(self._parts, self._masters, strict=True):
            self._adam.state[master] = {
                "step": self.count.to(master.device, copy=True),
                "exp_avg": self._m_N[part],
                "exp_avg_sq": self._v_N[part],
            }

    def step(self, gradient_N: Tensor, scale: Tensor, rate: float) -> None:
        """One update at learning rate `rate` with `gradient_N` x `scale` (0-dim); the gradient is used up."""
        self.count += 1
        flat = self._flat
        apart = flat.compute_N is not flat.master_N
        if self._kernel:
            from eagle3_core.drafter.kernels.adamw import adamw

            for part, master in zip(self._parts, self._masters, strict=True):
                adamw(
                    master, flat.compute_N[part] if apart else master, gradient_N[part], self._m_N[part],
                    self._v_N[part], scale.float(), rate=rate, betas=self._betas, weight_decay=self._decay,
                    step=int(self.count),
                )  # fmt: skip
            return
        for part, master in zip(self._parts, self._masters, strict=True):
            master.grad = gradient_N[part].float().mul_(scale)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        for part, master in zip(self._parts, self._masters, strict=True):
            master.grad = None
            if apart:
                with torch.no_grad():
                    flat.compute_N[part].copy_(master)

    def moments(self) -> dict[str, Tensor]:
        """Both running means, float32 [N]."""
        return dict(zip(MOMENTS, (self._m_N, self._v_N), strict=True))

    def begin_at(self, steps: int) -> None:
        """Go on after `steps` steps, with the moments as they are."""
        self.count.fill_(steps)
        for master in self._masters:
            self._adam.state[master]["step"].fill_(steps)
