"""Triton's kernels in Triton's interpreter, so that a machine without a GPU can compare them with torch.

The interpreter patches Triton's language anew for each call of one device function by another, which takes most of its
time; once per module is enough. `conftest.py` switches the interpreter on, before anything imports Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime import interpreter

from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.kernels.operations import TritonOperations

_patched: set[str] = set()


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.fn.__module__ not in _patched:
        _patched.add(self.fn.__module__)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


interpreter.InterpretedFunction.__call__ = _call


def kernels(config: DrafterConfig, **more: Any) -> TritonOperations:
    """The kernels' operations on the CPU."""
    return TritonOperations(config, torch.device("cpu"), **more)
