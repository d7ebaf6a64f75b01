"""The receipt: what an engine answers instead of hidden states, which are too many for an answer.

States go from the engine straight into an object store; the receipt names the object, says what it holds, and carries the
digests by which a reader finds out that these are the states of the prompt that was sent, whole and unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from eagle3_core.digests import digest_bytes

RECEIPT_FIELD = "aerie_receipt"
"""Field of an answer's `meta_info` that holds the receipt."""
CAPTURE_ROUTE = "/aerie/capture"
"""Where a capturing server says how it captures (GET)."""
PROTOCOL = 1
"""Version of what request, receipt and object look like. Server and stages must have the same."""
PREFIX = "captures/"
"""What the keys of captured states begin with."""


class CaptureFacts(BaseModel):
    """How a server captures, as its plug-in says it: the engine's own layers were held against this before it served."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    protocol: int
    plugin_version: str
    engine_version: str
    aux_layers: tuple[int, int, int]
    """Layer *inputs*, as the running engine captures them."""
    final: Literal["pre", "post"]
    sink: str
    """Where the states go: a store's URL, which never holds a secret."""


class Receipt(BaseModel):
    """Captured states of one prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    """Object in the sink: a safetensors file of `input_ids` i32 [T], `aux` [T, 3H], `final` [T, H]."""
    tokens: int
    prompt_digest: str
    """Of the token ids, as `prompt_digest` computes it."""
    size: int
    """Bytes of the object."""
    digest: str
    """Hex BLAKE3 of the object."""
    dtype: str
    aux_layers: tuple[int, int, int]
    """Layer *inputs*, as the running engine says it captures them."""
    final: Literal["pre", "post"]
    """Whether `final` is the state before or after the final norm."""
    engine_version: str
    plugin_version: str


def prompt_digest(ids: Sequence[int]) -> str:
    """Hex BLAKE3 of token ids as 32-bit little-endian numbers."""
    return digest_bytes(struct.pack(f"<{len(ids)}i", *ids))
