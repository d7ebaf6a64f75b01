"""The file that every benchmark leaves, in one shape whoever measured: `.aerie/bench/NAME.json`.

    {"machine": "...", "rows": [{"name", "value", "unit", "reference", "ratio", ...}, ...]}

`reference` is what the reference of that row reached in the same run; it and `ratio` are null where nothing ran beside it.
A row may say more under names of its own. Imports no torch, since `aerie bench` writes such files too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(".aerie/bench")
"""Where records lie, below the folder that a benchmark is started in."""


def write_record(name: str, machine: str, rows: Iterable[Mapping[str, Any]], folder: Path = FOLDER) -> Path:
    """Write `NAME.json` into `folder`, which is made, and return its path. `machine` says where this was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{name}.json"
    place.write_text(json.dumps({"machine": machine, "rows": [dict(row) for row in rows]}, indent=1) + "\n")
    return place
