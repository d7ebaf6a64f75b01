"""`aerie logs`: what the stages of a job said."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any

import typer
from rich.markup import escape

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url, job_path
from aerie_cli.output import Json, aside, command, document, people, plain
from aerie_cli.report import clock, why_ended
from aerie_cli.watch import EVERY_S, JobId, patiently
from eagle3_core.jobs.states import ENDED

STYLES = {"debug": "dim", "info": "", "warning": "yellow", "error": "red"}

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
        if not as_json:
            for line in why_ended(api.get(job_path(job))):
                aside().print(line)
    return 0


def _so_far(api: Api, job: str, stage: str | None, tail: int | None) -> list[dict[str, Any]]:
    if tail is not None:
        return api.get(job_path(job, "logs"), "list", stage=stage, tail=tail)["data"]
    return api.all(job_path(job, "logs"), stage=stage)


def _follow(api: Api, job: str, stage: str | None, seen: int, as_json: bool) -> None:
    while True:
        # Whether it has ended is asked before the lines, so that none is missed.
        over = patiently(partial(api.get, job_path(job)))["status"] in ENDED
        fresh = patiently(partial(api.get, job_path(job, "logs"), "list", stage=stage, after=seen))["data"]
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
            document(line, one_line=True)
            continue
        style = STYLES.get(line["level"], "")
        text = escape(plain(line["text"]))
        said = f"[{style}]{text}[/]" if style else text
        head = f"[dim]{clock(line['at'])}[/] {line['stage']:<9}[dim]/{line['unit']}[/]"
        console.print(f"{head} {said}")
