"""AdamW on float32 masters, the course of the learning rate, and the clip: all pure in the number of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

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


def scale_and_clip(
    gradients: Sequence[Tensor],
    denominator: Tensor | float,
    limit: float,
    joint: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Divide `gradients` by `denominator`, then scale them down to a joint L2 norm of at most `limit`, in place.

    Returns the norm before clipping, float64, on the gradients' device: nothing here waits for it. Gradients of
    numerators of several passes add up to the gradient of their quotient's numerator, so dividing once by the joint
    denominator makes accumulation exact. Where each rank holds a part of every gradient, `joint` adds the square of the
    norm up over ranks. A norm that is no number leaves no gradient that is one.
    """
    summed = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])).double()
    if joint is not None:
        summed = joint(summed.square()).sqrt()
    over = torch.as_tensor(denominator, dtype=torch.float64, device=summed.device)
    norm = summed / over
    scale = torch.where(norm > 0, limit / norm, 1.0).clamp(max=1.0) / over
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


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
