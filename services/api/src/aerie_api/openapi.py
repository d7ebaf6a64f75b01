"""Prints the OpenAPI document, the same bytes for the same code: `python -m aerie_api.openapi > openapi.json`."""

from __future__ import annotations

import json
import sys

from aerie_api.app import create_app
from aerie_api.settings import Settings


def text() -> str:
    """The document as indented JSON with sorted keys."""
    return json.dumps(create_app(Settings()).openapi(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
