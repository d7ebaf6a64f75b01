"""Which samples are held out: a fixed share, by the hash of a sample's number.

The choice depends on nothing else, so it stays the same when seed, order, epochs or the set's end change.
"""

from __future__ import annotations

from blake3 import blake3


def held_out(index: int, ratio: float) -> bool:
    """Whether sample `index` is among the held-out share `ratio` (0 to 1)."""
    return int.from_bytes(blake3(f"held out/{index}".encode()).digest(8), "big") < ratio * 2**64
