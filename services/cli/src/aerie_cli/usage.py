"""The group of all commands. It reports a command line that is not understood like every other error: as JSON if asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from typer.core import TyperGroup
from typer.exceptions import TyperException

from aerie_cli.exits import INVALID, READER_GONE
from aerie_cli.output import fail, forsake_output, refused_by_system, tidy_streams
from eagle3_core.errors import AerieError


class WrongUsage(AerieError):
    """The command line is not understood."""

    code, status = "cli.usage", 400


class Commands(TyperGroup):
    """All commands of `aerie`."""

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
        standalone_mode: bool = True, windows_expand_args: bool = True, **extra: Any,
    ) -> Any:  # fmt: skip
        """Run the command that `args` names, and exit with its status."""
        arguments = list(sys.argv[1:] if args is None else args)
        tidy_streams()
        try:
            status = super().main(arguments, prog_name, complete_var, False, windows_expand_args, **extra)
            sys.stdout.flush()
        except TyperException as error:
            status = _refuse(error, as_json="--json" in arguments)
        except BrokenPipeError:  # of a help or a version; commands see to their own
            forsake_output()
            status = READER_GONE
        except OSError as error:
            status = fail(refused_by_system(error), as_json=False)
        sys.exit(status if isinstance(status, int) else 0)


def _refuse(error: TyperException, as_json: bool) -> int:
    message = error.format_message().strip()
    if not message:  # a group without a command: its help was shown
        return INVALID
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "aerie"
    return fail(WrongUsage(f"{path}: {message}", remedy=f"`{path} --help` lists what it takes"), as_json)
