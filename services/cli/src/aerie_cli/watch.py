"""`aerie watch`: a job as it moves, to its end.

A terminal gets a bar for every stage; a log file gets a line when something changed, because bars would fill it with
control characters. An API that is restarted meanwhile is waited for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from types import TracebackType
from typing import Annotated, Any, Protocol, TypeVar

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column
from rich.text import Text

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url, job_path
from aerie_cli.exits import NotOurs, status_of_job
from aerie_cli.output import Json, aside, command, document, plain
from aerie_cli.report import COLOURS, WIDE, duration, reuse_note, show_job
from eagle3_core.errors import AerieError
from eagle3_core.jobs.states import ENDED
from eagle3_core.text import pace

EVERY_S = 1.0
ROOMY = 100
"""Columns from which on bars are long and notes still have room."""
LINE_EVERY_S = 60.0
"""How long a log file waits for a line of a stage that moves."""
AWAY_S = 120.0
"""How long an API that does not answer is waited for."""
AWAY = (429, 502, 503, 504)
"""Statuses of an API that is starting, overloaded, or not there behind its proxy."""
Result = TypeVar("Result")

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
    """A bar for every stage, and a line below for the whole job. A narrow terminal gets shorter bars and fewer columns."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or aside()
        width = self._console.width
        bar = 32 if width >= ROOMY else 12 if width >= WIDE else max(6, width - 37)
        note = Column(no_wrap=True, overflow="ellipsis", max_width=max(1, width - bar - 41))
        columns: list[ProgressColumn] = [
            TextColumn("{task.fields[mark]} {task.description:<9}"),
            BarColumn(bar_width=bar),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[units]:>7}"),
            TextColumn("{task.fields[clock]:>12}"),
            TextColumn("{task.fields[note]}", table_column=note),
        ]
        shown = columns if width >= WIDE else [*columns[:3], columns[4]]
        self._progress = Progress(*shown, console=self._console, auto_refresh=False)
        self._live = Live(self._progress, console=self._console, auto_refresh=False)
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
                mark=_mark(stage["state"]), clock=_clock(stage), note=escape(plain(_note(stage, loss, job["id"]))),
                units=f"{shards['done']}/{shards['total']}" if shards.get("total", 0) > 1 else "",
            )  # fmt: skip
        line = Text(plain(outlook(job)), style="dim", no_wrap=True, overflow="ellipsis")
        self._live.update(Group(self._progress, line) if line else self._progress, refresh=True)


class Lines:
    """A line when a stage starts, ends, got ten percent further or does something else, and once a minute while it moves;
    and when the job waits for something else."""

    def __init__(self, say: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, tuple[float, str]] = {}
        self._say = say or (lambda text: aside().print(Text(text)))
        self._said: dict[str, tuple[str, int, str]] = {}
        self._waits = ""

    def __enter__(self) -> Lines:
        """Nothing to begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""

    def show(self, job: dict[str, Any], loss: float | None) -> None:
        """Say what changed."""
        if (waits := job.get("why_queued") or "") != self._waits:
            self._waits = waits
            if waits:
                self._say(plain(f"waits: {waits}"))
        for stage in job["stages"]:
            if stage["state"] in ("pending", "queued"):
                continue
            words = re.sub(r"[0-9.]+", "", stage.get("note") or "")  # figures alone are no news
            now = (stage["state"], int(stage["progress_percentage"] // 10), words)
            parts = [
                f"{stage['name']:<9} {stage['state']:<9} {stage['progress_percentage']:>3.0f} %",
                _clock(stage),
                _note(stage, loss, job["id"]),
            ]
            line = plain("  ".join(part for part in parts if part))
            at, before = self._last.get(stage["name"], (self._clock(), ""))
            due = stage["state"] == "running" and line != before and self._clock() - at >= LINE_EVERY_S
            if self._said.get(stage["name"]) != now or due:
                self._said[stage["name"]], self._last[stage["name"]] = now, (self._clock(), line)
                self._say(line)


def _mark(state: str) -> str:
    sign = {"succeeded": "✓", "failed": "✗", "cancelled": "✗", "running": ">"}.get(state, " ")
    return f"[{COLOURS.get(state, 'white')}]{sign}[/]"


def outlook(job: dict[str, Any]) -> str:
    """What the whole job waits for, or when it is likely to be done."""
    if job.get("why_queued"):
        return f"waits: {job['why_queued']}"
    finish = job.get("estimated_finish")
    return f"done in about {duration(max(0.0, finish - time.time()))}" if finish else ""


def _clock(stage: dict[str, Any]) -> str:
    if stage["state"] == "running":
        left = stage.get("estimated_remaining_seconds")
        return f"{duration(left)} left" if left is not None else ""
    return duration(stage.get("seconds"))


def _note(stage: dict[str, Any], loss: float | None, job_id: str) -> str:
    if stage.get("reason"):
        return str(stage["reason"].get("detail", ""))
    parts = [reuse_note(stage, job_id)]
    if stage["state"] == "running":
        if stage.get("rate"):
            parts.append(f"{pace(stage['rate'])} {stage['rate_unit']}/s")
        parts.append(stage.get("note") or "")
        if stage["name"] == "train" and loss is not None:
            parts.append(f"loss {loss:.3f}")
    return ", ".join(part for part in parts if part)


def patiently(look: Callable[[], Result], wait: Callable[[float], object] = time.sleep) -> Result:
    """What `look` finds; an API that is restarted meanwhile is waited for."""
    until = time.monotonic() + AWAY_S
    while True:
        try:
            return look()
        except AerieError as error:
            if isinstance(error, NotOurs) or error.status not in AWAY or time.monotonic() > until:
                raise
            wait(EVERY_S)


class Follower:
    """Reads a job until it ends, cheaply: what did not change is answered by 304."""

    def __init__(self, api: Api, job_id: str, wait: Callable[[float], object] = time.sleep) -> None:
        self._api = api
        self._path = job_path(job_id)
        self._wait = wait
        self._tag: str | None = None
        self._job: dict[str, Any] = {}
        self._loss: float | None = None
        self._step = 0

    def run(self, view: View) -> dict[str, Any]:
        """Show the job until it has ended; its last document. Only an API that answered once is waited for."""
        self._look()
        while True:
            view.show(self._job, self._loss)
            if self._job["status"] in ENDED:
                return self._job
            self._wait(EVERY_S)
            patiently(self._look, self._wait)

    def _look(self) -> None:
        response = self._api.call("GET", self._path, headers={"If-None-Match": self._tag} if self._tag else None)
        if response.status_code != 304 or self._tag is None:
            self._job, self._tag = self._api.read(response, "job"), response.headers.get("ETag")
        if any(s["name"] == "train" and s["state"] == "running" for s in self._job["stages"]):
            query = {"stage": "train", "name": "loss", "since_step": self._step, "limit": 1000}
            points = self._api.get(f"{self._path}/metrics", "list", **query)["data"]
            if points:
                self._loss, self._step = points[-1]["value"], points[-1]["step"]


def follow(api: Api, job_id: str) -> dict[str, Any]:
    """Show a job until it has ended, in the way that suits where stderr goes; its last document."""
    console = aside()
    with Bars(console) if console.is_terminal and not console.is_dumb_terminal else Lines() as view:
        return Follower(api, job_id).run(view)


def follow_or_leave(api: Api, job_id: str) -> dict[str, Any]:
    """As `follow`; whoever leaves by Ctrl-C is told that the job goes on."""
    try:
        return follow(api, job_id)
    except KeyboardInterrupt:
        aside().print(f"the job goes on: `aerie watch {job_id}` shows it, `aerie cancel {job_id}` stops it")
        raise


@command
def watch(job: JobId, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False) -> int:
    """Show a job's progress until it ends, then its report. Exit status: 0 pass, 3 verdict fail, 1 failed."""
    with Api.found(url, folder) as api:
        finished = follow_or_leave(api, job)
    if as_json:
        document(finished)
    else:
        show_job(finished)
    return status_of_job(finished)
