"""`aerie up`: the whole house on this machine, until Ctrl-C."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from aerie_cli.client import DEFAULT_DIR
from aerie_cli.house import House
from aerie_cli.output import Json, command

Folder = Annotated[Path, typer.Option("--dir", help="Folder for database, objects and logs.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
Workers = Annotated[
    int | None, typer.Option("--workers", min=0, max=64, help="Workers. Default: 2, or 1 on a single core.")
]


def default_workers() -> int:
    """Two workers share a small machine; a single core gets one."""
    return 2 if (os.cpu_count() or 1) >= 2 else 1


@command
def up(folder: Folder = DEFAULT_DIR, port: Port = 0, workers: Workers = None, as_json: Json = False) -> int:
    """Start API and workers, restart whatever dies, stop everything on Ctrl-C. With --json, events as JSON lines on stdout."""

    def say(text: str) -> None:
        if as_json:
            typer.echo(json.dumps({"event": text}))
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    House(folder, port, default_workers() if workers is None else workers, say).run()
    say("stopped")
    return 0
