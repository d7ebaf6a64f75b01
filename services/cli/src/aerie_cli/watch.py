"""`aerie watch`: a job as it moves, to its end.

A terminal gets a bar for every stage; a log file gets a line when something changed, because bars would fill it with
control characters. An API that is restarted meanwhile is waited for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url
from aerie_cli.exits import NotReachable, status_of_job
from aerie_cli.output import Json, aside, command, document, people
from aerie_cli.report import COLOURS, duration, job_view, reuse_note

TERMINAL = ("succeeded", "failed", "cancelled")
EVERY_S = 1.0
AWAY_S = 120.0
"""How long an API that does not answer is waited for."""

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")]


class View(Protocol):
    """Shows a job again and again."""

    def __enter__(self) -> View:
        """Begin to show."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        ...

    def show(self, job: dict[str, Any], loss: float | None) -> None:
        """Show the job's present document; `loss` is the newest value of its training loss."""
        ...


class Bars:
    """A bar for every stage."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.fields[mark]} {task.description:<9}"), BarColumn(bar_width=32), TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[units]:>7}"), TextColumn("{task.fields[clock]:>9}"), TextColumn("{task.fields[note]}"),
            console=console or aside(), auto_refresh=False,
        )  # fmt: skip
        self._live = Live(self._progress, console=self._progress.console, auto_refresh=False)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Bars:
        """Take the terminal."""
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it as it is."""
        self._live.__exit__(kind, error, trace)

    def show(self, job: dict[str, Any], loss: float | None) -> None:
        """Move the bars."""
        for stage in job["stages"]:
            if stage["name"] not in self._tasks:
                self._tasks[stage["name"]] = self._progress.add_task(
                    stage["name"], total=100, mark=" ", units="", clock="", note=""
                )
            shards = stage.get("shards") or {}
            self._progress.update(
                self._tasks[stage["name"]], completed=stage["progress_percentage"],
                mark=_mark(stage["state"]), clock=_clock(stage), note=escape(_note(stage, loss, job["id"])),
                units=f"{shards['done']}/{shards['total']}" if shards.get("total", 0) > 1 else "",
            )  # fmt: skip
        self._live.refresh()


class Lines:
    """A line when a stage starts, ends or got ten percent further."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say or (lambda text: aside().print(Text(text), soft_wrap=True))
        self._said: dict[str, tuple[str, int]] = {}

    def __enter__(self) -> Lines:
        """Nothing to begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""

    def show(self, job: dict[str, Any], loss: float | None) -> None:
        """Say what changed."""
        for stage in job["stages"]:
            now = (stage["state"], int(stage["progress_percentage"] // 10))
            if stage["state"] in ("pending", "queued") or self._said.get(stage["name"]) == now:
                continue
            self._said[stage["name"]] = now
            parts = [
                f"{stage['name']:<9} {stage['state']:<9} {stage['progress_percentage']:>3.0f} %",
                _clock(stage),
                _note(stage, loss, job["id"]),
            ]
            self._say("  ".join(part for part in parts if part))


def _mark(state: str) -> str:
    sign = {"succeeded": "✓", "failed": "✗", "cancelled": "✗", "running": ">"}.get(state, " ")
    return f"[{COLOURS[state]}]{sign}[/]"


def _clock(stage: dict[str, Any]) -> str:
    if stage["state"] == "running":
        left = stage.get("estimated_remaining_seconds")
        return f"-{duration(left)}" if left is not None else ""
    return duration(stage.get("seconds"))


def _note(stage: dict[str, Any], loss: float | None, job_id: str) -> str:
    if stage.get("reason"):
        return str(stage["reason"].get("detail", ""))
    parts = [reuse_note(stage, job_id)]
    if stage["state"] == "running":
        if stage.get("rate"):
            parts.append(f"{stage['rate']:.3g} {stage['rate_unit']}/s")
        parts.append(stage.get("note") or "")
        if stage["name"] == "train" and loss is not None:
            parts.append(f"loss {loss:.3f}")
    return ", ".join(part for part in parts if part)


class Follower:
    """Reads a job until it ends, cheaply: what did not change is answered by 304."""

    def __init__(self, api: Api, job_id: str, wait: Callable[[float], object] = time.sleep) -> None:
        self._api = api
        self._path = f"/jobs/{job_id}"
        self._wait = wait
        self._tag: str | None = None
        self._job: dict[str, Any] = {}
        self._loss: float | None = None
        self._step = 0

    def run(self, view: View) -> dict[str, Any]:
        """Show the job until it has ended; its last document."""
        while True:
            self._patiently(self._look)
            view.show(self._job, self._loss)
            if self._job["status"] in TERMINAL:
                return self._job
            self._wait(EVERY_S)

    def _look(self) -> None:
        response = self._api.call("GET", self._path, headers={"If-None-Match": self._tag} if self._tag else None)
        if response.status_code != 304:
            self._job, self._tag = response.json(), response.headers.get("ETag")
        if any(s["name"] == "train" and s["state"] == "running" for s in self._job["stages"]):
            query = {"stage": "train", "name": "loss", "since_step": self._step, "limit": 1000}
            points = self._api.get(f"{self._path}/metrics", **query)["data"]
            if points:
                self._loss, self._step = points[-1]["value"], points[-1]["step"]

    def _patiently(self, look: Callable[[], None]) -> None:
        until = time.monotonic() + AWAY_S
        while True:
            try:
                return look()
            except NotReachable:
                if time.monotonic() > until:
                    raise
                self._wait(EVERY_S)


def follow(api: Api, job_id: str) -> dict[str, Any]:
    """Show a job until it has ended, in the way that suits where stderr goes; its last document."""
    with Bars() if sys.stderr.isatty() else Lines() as view:
        return Follower(api, job_id).run(view)


@command
def watch(job: JobId, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False) -> int:
    """Show a job's progress until it ends, then its report. Exit status: 0 pass, 3 verdict fail, 1 failed."""
    with Api.found(url, folder) as api:
        finished = follow(api, job)
    if as_json:
        document(finished)
    else:
        people().print(job_view(finished))
    return status_of_job(finished)
