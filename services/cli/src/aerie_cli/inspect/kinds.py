"""What kind of file or folder a person named by mistake, so that the message can say it.

"This is a drafter's folder" helps more than the error of a reader that expected a shard. Only the beginning of a file is read,
and the kind is a guess: it changes the message and nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path

BEGINNING_BYTES = 64 << 10
MAGIC = {
    b"PAR1": "a Parquet file", b"GGUF": "a GGUF model", b"\x1f\x8b": "a gzip file", b"\x28\xb5\x2f\xfd": "a Zstandard file",
    b"PK\x03\x04": "a zip archive, as torch.save writes", b"\x80": "a Python pickle", b"SQLite format 3": "a SQLite database",
}  # fmt: skip
"""First bytes of kinds of file that lie near shards and drafters."""


def looks_like(path: Path) -> str | None:
    """What `path` holds, by its beginning, in words; None where it shows nothing, or cannot be read."""
    try:
        with path.open("rb") as file:
            beginning = file.read(BEGINNING_BYTES)
    except OSError:
        return None
    for magic, kind in MAGIC.items():
        if beginning.startswith(magic):
            return kind
    if b"\0" in beginning or not beginning.strip():
        return None
    text = beginning.decode("utf-8", "replace")
    lines = [line for line in text.splitlines() if line.strip()]
    if _is_json(lines[0]) and lines[0].lstrip().startswith("{"):
        return "JSON lines, as data sets are" if len(lines) > 1 else "a JSON document"
    if text.lstrip().startswith(("{", "[")):
        return "a JSON document"
    return "text"


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
