"""Where the project keeps what it fetches or converts once for a user."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder of the project: AERIE_CACHE, else below XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("AERIE_CACHE"):
        return Path(own).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "aerie"
