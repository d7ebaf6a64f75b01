"""Log lines for machines: one JSON object a line, with what the line is about (request, job, stage, unit, attempt, tenant).

Code logs with the standard library; `configure` gives the process its one handler. What a line is about is not repeated in
every call: `about` opens a block that all lines in it share, also those of threads that the block starts with a copied
context, and `note` adds to the block what is learnt later (a request learns its job when it has found the unit). On a
terminal the same lines are written for people.

Secrets stay out: what looks like one (bearer tokens, API keys, passwords in URLs) and the value of every field that is
named like one is replaced before a line is written, tracebacks included.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor

from eagle3_core.telemetry.secrets import hide

Form = Literal["json", "text"]
_about: ContextVar[dict[str, Any] | None] = ContextVar("aerie_log_fields", default=None)


@contextmanager
def about(**fields: Any) -> Generator[None]:
    """Say with every line of the block what it is about; None is left out."""
    token = _about.set({**(_about.get() or {}), **_given(fields)})
    try:
        yield
    finally:
        _about.reset(token)


def note(**fields: Any) -> None:
    """Add to the innermost block of `about`, for all who share it; nothing happens outside of one."""
    if (shared := _about.get()) is not None:
        shared.update(_given(fields))


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def configure(stream: TextIO | None = None, form: Form | None = None, level: int = logging.INFO) -> None:
    """Write all log lines of the process to `stream` (default stderr): as JSON, for people if it is a terminal, or as told."""
    out = stream or sys.stderr
    chosen = form or ("text" if out.isatty() else "json")
    handler = _Lines(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=_before(), processors=_after(chosen, out.isatty()))
    )
    root = logging.getLogger()
    root.handlers[:] = [*(old for old in root.handlers if not isinstance(old, _Lines)), handler]
    root.setLevel(level)


class _Lines(logging.StreamHandler[TextIO]):
    """Ours: a second `configure` replaces it and leaves what others listen with."""


def _before() -> list[Processor]:
    return [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_about,
    ]


def _after(form: Form, colors: bool) -> list[Processor]:
    common: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if form == "text":
        plain = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
        return [*common, structlog.processors.format_exc_info, _hide, plain]
    return [*common, structlog.processors.format_exc_info, _hide, structlog.processors.JSONRenderer(default=str)]


def _add_about(_logger: Any, _method: str, event: EventDict) -> EventDict:
    for name, value in (_about.get() or {}).items():
        event.setdefault(name, value)
    return event


def _hide(_logger: Any, _method: str, event: EventDict) -> EventDict:
    return hide(event)
