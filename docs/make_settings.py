"""Makes `docs/settings.md` from the API's settings model: every variable, its default, what it means.

.venv/bin/python docs/make_settings.py > docs/settings.md
"""

from __future__ import annotations

import json
import sys
from typing import Any

from aerie_api.settings import Settings

HEAD = """# Settings of the API

Made by `docs/make_settings.py` from the model that reads them. They are environment variables, read once at the start; a value that
does not validate ends the process with the variable's name. Those of workers are on the pages of what they are for:
[cluster.md](cluster.md), [storage.md](storage.md), [sglang.md](sglang.md), [endpoints.md](endpoints.md), [runbook.md](runbook.md).

| variable | default | meaning |
|---|---|---|
"""


def render() -> str:
    """The page as Markdown."""
    schema = Settings.model_json_schema()
    return HEAD + "".join(_row(name, field) for name, field in schema["properties"].items())


def _row(name: str, field: dict[str, Any]) -> str:
    meaning = (
        " ".join(str(field.get("description", "")).split())
        .replace("|", "\\|")
        .replace("`run_dir/server.json`", "`server.json` in `AERIE_RUN_DIR`")
        .replace("`run_dir/", "`AERIE_RUN_DIR/")
    )
    return f"| `AERIE_{name.upper()}` | {_default(field.get('default'))} | {meaning} |\n"


def _default(value: Any) -> str:
    if value is None or value in ("", [], ()):
        return "none"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


if __name__ == "__main__":
    sys.stdout.write(render())
