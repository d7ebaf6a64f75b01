"""`aerie inspect`: what a job, a shard or a drafter holds, without loading torch."""

from __future__ import annotations

import typer

from aerie_cli.inspect.drafter import drafter
from aerie_cli.inspect.job import job
from aerie_cli.inspect.shard import shard

inspect = typer.Typer(no_args_is_help=True, help="Look inside a job, a shard or a drafter.")
for function in (job, shard, drafter):
    inspect.command(function.__name__)(function)
