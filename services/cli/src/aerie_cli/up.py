"""`aerie up`: the whole house on this machine, until Ctrl-C."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from aerie_cli.client import DEFAULT_DIR
from aerie_cli.house import House
from aerie_cli.output import Json, command, document, plain
from eagle3_core.cores import THREADS_VARIABLE, default_workers, share, unit_threads, usable_cores

Folder = Annotated[Path, typer.Option("--dir", help="Folder for database, objects and logs.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
WORKERS_HELP = (
    "Workers. Each holds its own copy of the verifier: fewer for a large one. Default, by this machine's cores: 1 on one "
    "core, 2 up to eleven, then one for every four cores, at most 4."
)
THREADS_HELP = (
    "CPU threads of a unit of generate, extract or evaluate; training uses all cores. Default: the cores shared out among "
    "the workers. The same number gives the same drafter, bit for bit."
)
Workers = Annotated[int | None, typer.Option("--workers", min=0, max=64, help=WORKERS_HELP)]
Threads = Annotated[int | None, typer.Option("--threads", min=1, max=1024, help=THREADS_HELP)]


def crew(workers: int | None, threads: int | None) -> tuple[int, int]:
    """How many workers with how many threads each, where only some of it, or nothing, was asked for. Raises BadThreads."""
    cores = usable_cores()
    workers = default_workers(cores) if workers is None else workers
    if threads is None:
        threads = unit_threads() if os.environ.get(THREADS_VARIABLE) else share(cores, workers)
    return workers, threads


@command
def up(
    folder: Folder = DEFAULT_DIR,
    port: Port = 0,
    workers: Workers = None,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """Start API and workers, restart whatever dies, stop everything on Ctrl-C. With --json, events as JSON lines on stdout."""

    def say(text: str) -> None:
        if as_json:
            document({"event": text}, one_line=True)
            sys.stdout.flush()
        else:
            sys.stderr.write(plain(text) + "\n")
            sys.stderr.flush()

    House(folder, port, *crew(workers, threads), say).run()
    say("stopped")
    return 0
