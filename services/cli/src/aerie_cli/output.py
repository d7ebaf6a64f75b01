"""What a command says: to people through rich, to programs as one JSON document on stdout and nothing else there."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from aerie_cli.exits import INTERRUPTED, status_of
from eagle3_core.errors import AerieError

Given = ParamSpec("Given")
Result = TypeVar("Result")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of text.")]


def people() -> Console:
    """Where people read results."""
    return Console(file=sys.stdout, highlight=False)


def aside() -> Console:
    """Where people read what is not the result: progress, warnings, errors."""
    return Console(file=sys.stderr, highlight=False)


def document(value: Any) -> None:
    """Print `value` as the command's JSON document."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


def say_error(error: AerieError, as_json: bool) -> None:
    """Print a failure: as problem document on stdout, or in words on stderr."""
    if as_json:
        document(error.problem())
        return
    where = f" (at {error.pointer})" if error.pointer else ""
    console = aside()
    console.print(
        f"[bold red]error[/] [bold]{escape(error.code)}[/]{escape(where)}: {escape(error.detail)}", soft_wrap=True
    )
    for fault in (error.context.get("faults") or [])[1:]:
        console.print(f"  also {escape(str(fault.get('pointer')))}: {escape(str(fault.get('detail')))}", soft_wrap=True)
    if error.remedy:
        console.print(f"  remedy: {escape(error.remedy)}", soft_wrap=True)


def command(function: Callable[Given, int | None]) -> Callable[Given, None]:
    """`function` as a command: its result is the exit status, its errors are told and become one."""

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> None:
        try:
            status = function(*args, **kwargs)
        except AerieError as error:
            say_error(error, bool(kwargs.get("as_json")))
            raise typer.Exit(status_of(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        raise typer.Exit(status or 0)

    return run
