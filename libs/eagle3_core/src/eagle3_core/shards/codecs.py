"""How rows of hidden states become tensors in a file, and back.

A codec names its tensors after the states they hold (`aux`, or `aux.exponents` and `aux.mantissas`), so several can
share one file layout, and reads any run of rows without touching the rest.

Shapes: R rows, W width of a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle3_core.shards.layout import UnknownCodec
from eagle3_core.verifier.base import STORED_DTYPE


class Codec(Protocol):
    """One way to store states."""

    name: str
    stored_dtype: torch.dtype
    """What `decode` gives."""

    def row_bytes(self, width: int) -> int:
        """Bytes of one stored row, at most."""
        ...

    def encode(self, name: str, rows_RW: Tensor) -> dict[str, Tensor]:
        """The tensors to store for the states called `name`."""
        ...

    def shape(self, file: Any, name: str) -> tuple[int, ...]:
        """[R, W] of the states called `name` in an open safetensors file; raises KeyError or ValueError if it is not there."""
        ...

    def decode(self, file: Any, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of the states called `name`, from an open safetensors file."""
        ...


class Raw:
    """bfloat16, as it comes."""

    name = "raw"
    stored_dtype = STORED_DTYPE

    def row_bytes(self, width: int) -> int:
        """Two bytes an element."""
        return width * self.stored_dtype.itemsize

    def encode(self, name: str, rows_RW: Tensor) -> dict[str, Tensor]:
        """The rows themselves."""
        return {name: rows_RW.to(self.stored_dtype).contiguous()}

    def shape(self, file: Any, name: str) -> tuple[int, ...]:
        """Shape of the tensor."""
        stored = file.get_slice(name)
        if stored.get_dtype() != "BF16":
            raise ValueError(f"{name} is {stored.get_dtype()}, codec raw stores BF16")
        return tuple(stored.get_shape())

    def decode(self, file: Any, name: str, start: int, stop: int) -> Tensor:
        """A slice of the tensor."""
        return file.get_slice(name)[start:stop]


CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Raw(),)}


def codec_called(name: str) -> Codec:
    """The codec of that name. Raises UnknownCodec."""
    if name not in CODECS:
        raise UnknownCodec(
            f"codec {name!r} is not among {', '.join(CODECS)}",
            remedy="read the shards with the version that wrote them",
        )
    return CODECS[name]
