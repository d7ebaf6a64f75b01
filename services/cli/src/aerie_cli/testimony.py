"""What the processes of a house report about themselves: where the API listens, how one ended and why, the end of its log."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_core import strict_json
from eagle3_core.errors import AerieError

LOG_TAIL_LINES = 12


def problem_in(line: bytes) -> AerieError | None:
    """The error that a process told in its last line on stdout, if it is one."""
    try:
        document = strict_json.loads_object(line)
    except ValueError:
        return None
    return AerieError.from_problem(document) if isinstance(document.get("code"), str) else None


def read_server(path: Path) -> Mapping[str, Any] | None:
    """What the API says about itself, if it says something."""
    try:
        found = strict_json.loads_object(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found.get("url"), str) and isinstance(found.get("pid"), int) else None


def how(code: int) -> str:
    """An exit status in words."""
    if code < 0:
        return f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"
    return f"exit status {code}"


def tail(log: Path) -> str:
    """The last lines of a log, indented."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        return ""
    return "\n".join(f"    {line}" for line in lines)
