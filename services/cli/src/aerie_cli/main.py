"""The `aerie` command: one module for each thing it does, put together here."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from aerie_cli.bench import bench
from aerie_cli.demo import demo
from aerie_cli.download import download
from aerie_cli.inspect import inspect
from aerie_cli.keys import keys
from aerie_cli.lifecycle import cancel, pause, resume, retry
from aerie_cli.logs import logs
from aerie_cli.plan import plan
from aerie_cli.stage import stage
from aerie_cli.status import status
from aerie_cli.submit import submit
from aerie_cli.support import support_bundle
from aerie_cli.tenants import tenants
from aerie_cli.up import up
from aerie_cli.usage import Commands
from aerie_cli.watch import watch

app = typer.Typer(
    name="aerie", cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False,
    help="EAGLE-3 draft models as a service: post a job, get a measured drafter.\n\n"
    "Exit status: 0 fine, 1 failed, 2 invalid request, 3 the drafter is below its gate, 4 no API answers, 75 stopped by "
    "SIGTERM with its work saved, 130 interrupted, 141 the reader of the output has gone.",
)  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        typer.echo(importlib.metadata.version("aerie_cli"))
        raise typer.Exit


@app.callback()
def aerie(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
) -> None:
    """EAGLE-3 draft models as a service: post a job, get a measured drafter."""


for function in (up, demo, stage, plan, submit, status, watch, logs, cancel, retry, pause, resume, download):
    app.command(function.__name__)(function)
app.command("support-bundle")(support_bundle)
app.add_typer(inspect, name="inspect")
app.add_typer(keys, name="keys")
app.add_typer(tenants, name="tenants")
app.add_typer(bench, name="bench")
