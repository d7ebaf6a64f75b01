"""BLAKE3 digests of bytes, files and JSON values: the only way the house names content.

BLAKE3 because it is three times as fast as SHA-256 on one thread, and manifests are verified on every read.
A JSON value is digested in its canonical form (sorted keys, no spaces, UTF-8), so equal values have equal digests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

CHUNK_BYTES = 1 << 20


def canonical(value: Any) -> bytes:
    """`value` as canonical JSON. Raises ValueError on NaN, TypeError on what JSON cannot hold."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_json(value: Any) -> str:
    """Hex BLAKE3 of the canonical JSON of `value`."""
    return blake3(canonical(value)).hexdigest()


def digest_bytes(data: bytes | memoryview) -> str:
    """Hex BLAKE3 of `data`."""
    return blake3(data).hexdigest()


def digest_file(path: Path) -> str:
    """Hex BLAKE3 of the content of `path`, read in 1 MiB pieces."""
    hasher = blake3()
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()
