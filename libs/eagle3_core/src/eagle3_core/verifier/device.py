"""Where a stage computes: what a job's `verifier.device` means on this machine."""

from __future__ import annotations

from typing import Literal

import torch

from eagle3_core.errors import AerieError


class NoGpu(AerieError):
    """A job asks for GPUs, and this machine shows none."""

    code, status, retryable = "device.no_gpu", 409, True


def pick_device(device: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """What `device` means on this machine. Raises NoGpu."""
    if device == "cuda" and not torch.cuda.is_available():
        raise NoGpu(
            "verifier.device is cuda, and this machine shows no GPU",
            remedy="start a worker on a machine with a GPU, or set verifier.device to auto or cpu",
            pointer="/verifier/device",
        )
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device
