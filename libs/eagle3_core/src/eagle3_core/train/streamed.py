"""Tensors written to a safetensors file piece by piece, straight from where they are, digested on the way.

The library's own writer makes a Python object of every tensor's bytes and holds the interpreter meanwhile: seconds for
a checkpoint of 5 GB, in which the thread that trains cannot launch a step (on an H200 two saves in 220 steps cost the
steps 5.6 s). Here copies, writes and the digest of a piece all let it go, and no second copy of the state is made in host
memory.

Shapes: N bytes of a piece.
"""

from __future__ import annotations

from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from eagle3_core.tensor_table import head_of

PIECE_BYTES = 1 << 24
DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.int64: "I64"}
"""The format's names of what a training state holds."""


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> tuple[str, int]:
    """Write `tensors` in the order of their names to `path`; (BLAKE3 in hex, bytes) of the file.

    The dictionary is emptied on the way, so that each tensor's memory is free once it is written. What lies on a GPU is
    read over the current stream.
    """
    names = sorted(tensors)
    hasher, size = blake3(), 0
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    staging_N = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
    with path.open("wb", buffering=0) as file:

        def put(piece: bytes | memoryview) -> None:
            nonlocal size
            hasher.update(piece)
            size += len(piece)
            while len(piece):
                piece = piece[file.write(piece) :]

        put(head_of({name: (DTYPES[tensors[name].dtype], tensors[name].shape) for name in names}))
        for name in names:
            bytes_N = tensors.pop(name).detach().contiguous().reshape(-1).view(torch.uint8)
            for piece_N in bytes_N.split(PIECE_BYTES) if len(bytes_N) else ():
                put(_on_host(piece_N, staging_N).numpy().data)
    return hasher.hexdigest(), size


def _on_host(piece_N: Tensor, staging_N: Tensor) -> Tensor:
    """The piece as it is if it lies there already, else copied into page-locked memory, which a GPU fills by itself."""
    if not piece_N.is_cuda:
        return piece_N
    there_N = staging_N[: len(piece_N)]
    there_N.copy_(piece_N, non_blocking=True)
    torch.cuda.current_stream(piece_N.device).synchronize()
    return there_N
