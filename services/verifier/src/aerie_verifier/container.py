"""A safetensors file laid out in one buffer, copied once and without holding the interpreter.

The library's own `save` copies every tensor as a Python object: for a prompt of 2,048 tokens of an 8B verifier the
interpreter stands still for some 70 ms, and with it the thread that launches the next pass. Copies between tensors let it go.

Shapes: n tokens of a part, T tokens of all parts, D values of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eagle3_core.tensor_table import head_of

NAMES = {torch.int32: "I32", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""The format's names of what states and tokens can be."""


def container(tensors: Mapping[str, Sequence[Tensor]]) -> memoryview:
    """The file of `tensors`, each the rows of its parts one after another: parts [n, ...] make one tensor [T, ...]."""
    shapes = {name: (sum(len(part) for part in parts), *parts[0].shape[1:]) for name, parts in tensors.items()}
    head = head_of({name: (NAMES[parts[0].dtype], shapes[name]) for name, parts in tensors.items()})
    size = sum(part.nbytes for parts in tensors.values() for part in parts)
    file_B = torch.empty(len(head) + size, dtype=torch.uint8)
    file_B[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    at = len(head)
    for part in (part for parts in tensors.values() for part in parts if part.numel()):
        file_B[at : at + part.nbytes].copy_(part.contiguous().view(torch.uint8).reshape(-1))
        at += part.nbytes
    return file_B.numpy().data
