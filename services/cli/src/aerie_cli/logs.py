"""`aerie logs`: what the stages of a job said."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.markup import escape

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url
from aerie_cli.output import Json, command, document, people
from aerie_cli.watch import TERMINAL, JobId

STYLES = {"debug": "dim", "info": "", "warning": "yellow", "error": "red"}
EVERY_S = 1.0

Stage = Annotated[str | None, typer.Option("--stage", help="Only this stage.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")]
Tail = Annotated[int | None, typer.Option("--tail", min=1, max=10000, help="Only the last lines.")]


@command
def logs(
    job: JobId, stage: Stage = None, follow: Follow = False, tail: Tail = None, url: Url = None, folder: Dir = DEFAULT_DIR,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Print a job's log. With --json: one document, or with --follow one JSON line for each line of the log."""
    with Api.found(url, folder) as api:
        lines = _so_far(api, job, stage, tail)
        if as_json and not follow:
            document({"object": "list", "data": lines, "has_more": False, "last_seq": lines[-1]["seq"] if lines else 0})
            return 0
        _print(lines, as_json)
        if follow:
            _follow(api, job, stage, lines[-1]["seq"] if lines else 0, as_json)
    return 0


def _so_far(api: Api, job: str, stage: str | None, tail: int | None) -> list[dict[str, Any]]:
    page = api.get(f"/jobs/{job}/logs", stage=stage, tail=tail)
    lines: list[dict[str, Any]] = page["data"]
    while page["has_more"] and tail is None:
        page = api.get(f"/jobs/{job}/logs", stage=stage, after=page["last_seq"])
        lines += page["data"]
    return lines


def _follow(api: Api, job: str, stage: str | None, seen: int, as_json: bool) -> None:
    while True:
        over = api.get(f"/jobs/{job}")["status"] in TERMINAL  # asked before the lines, so that none is missed
        fresh = api.get(f"/jobs/{job}/logs", stage=stage, after=seen)["data"]
        _print(fresh, as_json)
        if fresh:
            seen = fresh[-1]["seq"]
        elif over:
            return
        else:
            time.sleep(EVERY_S)


def _print(lines: list[dict[str, Any]], as_json: bool) -> None:
    console = people()
    for line in lines:
        if as_json:
            typer.echo(json.dumps(line, ensure_ascii=False))
            continue
        at = time.strftime("%H:%M:%S", time.localtime(line["at"]))
        style = STYLES.get(line["level"], "")
        text = f"[{style}]{escape(line['text'])}[/]" if style else escape(line["text"])
        console.print(f"[dim]{at}[/] {line['stage']:<9}[dim]/{line['unit']}[/] {text}", soft_wrap=True)
