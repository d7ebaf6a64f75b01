"""What a command says: to people through rich, to programs as one JSON document on stdout and nothing else there.

What files, jobs and other processes say is shown without its control characters: a log line must not move the cursor, and
a file's name must not clear the screen. JSON stays JSON whatever it carries.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn, ParamSpec, TextIO, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from aerie_cli.exits import FAILED, INTERRUPTED, READER_GONE, status_of
from eagle3_core.errors import AerieError

Given = ParamSpec("Given")
Result = TypeVar("Result")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of text.")]

PIPE_COLUMNS = 200
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)  # control characters but tab and line feed; marks that turn text around; halves of surrogate pairs


class SystemRefused(AerieError):
    """The operating system refuses: no permission, no room, no such place."""

    code, status = "system.refused", 500


class Terminal(Console):
    """A console for one of our streams. What goes into a file or a pipe is as wide as it needs, so that ids stay whole.

    Sentences are not broken into lines at all: a terminal does it itself, and a search finds them whole.
    """

    def __init__(self, file: TextIO) -> None:
        wide = None if "COLUMNS" in os.environ or file.isatty() else PIPE_COLUMNS
        super().__init__(file=file, highlight=False, width=wide)

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        """As Console prints, but only tables and the like are fitted to the width."""
        sentences = all(isinstance(part, str | Text) for part in objects)
        super().print(*objects, soft_wrap=sentences if soft_wrap is None else soft_wrap, **options)

    def on_broken_pipe(self) -> NoReturn:
        """Let whoever handles every other end of a command handle this one."""
        raise BrokenPipeError


def value_text(value: Any) -> str:
    """A value of a document as people write it: text as it is, anything else as JSON and not as Python."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def people() -> Console:
    """Where people read results."""
    return Terminal(sys.stdout)


def aside() -> Console:
    """Where people read what is not the result: progress, warnings, errors."""
    return Terminal(sys.stderr)


def remark(text: str) -> None:
    """Tell people one thing beside the result. `text` may hold anything."""
    aside().print(escape(plain(text)))


def plain(value: Any) -> Any:
    """`value` with every string in it made harmless for a terminal."""
    if isinstance(value, str):
        return _UNSEEN.sub(lambda found: found.group().encode("unicode_escape").decode(), value)
    if isinstance(value, dict):
        return {plain(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def document(value: Any, *, one_line: bool = False) -> None:
    """Print `value` as the command's JSON document; where streams of documents are read, on one line."""
    utf8 = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    typer.echo(json.dumps(_json(value), indent=None if one_line else 1, ensure_ascii=not utf8, allow_nan=False))


def _json(value: Any) -> Any:
    """`value` with what JSON cannot hold replaced: NaN and infinities by null, half surrogate pairs by U+FFFD."""
    if isinstance(value, dict):
        return {_json(str(name)): _json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return re.sub("[\ud800-\udfff]", "\ufffd", value) if isinstance(value, str) else value


def say_error(error: AerieError, as_json: bool) -> None:
    """Print a failure: as problem document on stdout, in one line; or in words on stderr."""
    if as_json:
        document(error.problem(), one_line=True)
        return
    console = aside()
    where = f" (at {error.pointer})" if error.pointer else ""
    head, where, detail = (escape(plain(text)) for text in (error.code, where, error.detail))
    console.print(f"[bold red]error[/] [bold]{head}[/]{where}: {detail}")
    for fault in (error.context.get("faults") or [])[1:]:
        pointer, detail = (escape(plain(str(fault.get(name)))) for name in ("pointer", "detail"))
        console.print(f"  also {pointer}: {detail}")
    if error.remedy:
        console.print(f"  remedy: {escape(plain(error.remedy))}")


def command(function: Callable[Given, int | None]) -> Callable[Given, None]:
    """`function` as a command: its result is the exit status, its errors are told and become one."""

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        try:
            try:
                status = function(*args, **kwargs) or 0
                sys.stdout.flush()
            except AerieError as error:
                status = fail(error, as_json)
        except KeyboardInterrupt:
            status = INTERRUPTED
        except BrokenPipeError:
            forsake_output()
            status = READER_GONE
        except OSError as error:
            status = fail(refused_by_system(error), as_json)
        except Exception as error:
            traceback.print_exc()
            what = f"{function.__name__} ended in {type(error).__name__}: {error}"
            status = fail(
                AerieError(what, remedy="this is a fault of Aerie: report it with what stands above"), as_json
            )
        raise typer.Exit(status)

    return run


def fail(error: AerieError, as_json: bool) -> int:
    """Tell `error`; the exit status that it stands for. Where nothing can be told any more, only the status is left."""
    try:
        say_error(error, as_json)
        sys.stdout.flush()
    except BrokenPipeError:
        forsake_output()
    except OSError:
        if as_json:  # stdout takes nothing, stderr may
            with contextlib.suppress(OSError):
                say_error(error, as_json=False)
        forsake_output()
        return FAILED
    return status_of(error)


def refused_by_system(error: OSError) -> SystemRefused:
    """`error` of a stream or a place in the house's own words."""
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return SystemRefused(what, remedy="make room, or choose a place that you may use")


def tidy_streams() -> None:
    """Let no character and no closed stream end a command: what an encoding lacks is shown as its number."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until this process ends
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def forsake_output() -> None:
    """Send what is still buffered nowhere, so that nothing complains of it when the process ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            os.dup2(nowhere, stream.fileno())
        except (OSError, ValueError):  # not a stream of the operating system
            continue
    os.close(nowhere)
