"""A safetensors file laid out in one buffer, copied once and without holding the interpreter.

The library's own `save` copies every tensor as a Python object: for a prompt of 2,048 tokens of an 8B verifier the
interpreter stands still for some 70 ms, and with it the thread that launches the next pass. Copies between tensors let it go.

Shapes: n tokens of a part, T tokens of all parts, D values of a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 8
"""The header's size is a multiple of it, as the format asks."""
NAMES = {torch.int32: "I32", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""The format's names of what states and tokens can be."""


def container(tensors: Mapping[str, Sequence[Tensor]]) -> memoryview:
    """The file of `tensors`, each the rows of its parts one after another: parts [n, ...] make one tensor [T, ...]."""
    entries: dict[str, object] = {}
    size = 0
    for name, parts in tensors.items():
        shape = [sum(len(part) for part in parts), *parts[0].shape[1:]]
        end = size + prod(shape) * parts[0].element_size()
        entries[name] = {"dtype": NAMES[parts[0].dtype], "shape": shape, "data_offsets": [size, end]}
        size = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    file_B = torch.empty(len(header) + size, dtype=torch.uint8)
    file_B[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    at = len(header)
    for part in (part for parts in tensors.values() for part in parts if part.numel()):
        file_B[at : at + part.nbytes].copy_(part.contiguous().view(torch.uint8).reshape(-1))
        at += part.nbytes
    return file_B.numpy().data
