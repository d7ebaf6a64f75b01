"""`aerie stage`: one stage of a job in this process, without a service.

What it reads is run first where it has not run yet; what ran already, with the same inputs and settings, is reused from
the folder. It computes here, so unlike every other command it loads torch (and only here, when the stage needs it).
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from aerie_cli.jobfile import Changes, read_job
from aerie_cli.output import Json, aside, command, document, people
from aerie_cli.report import duration
from eagle3_core.errors import InvalidRequest
from eagle3_core.folders import cache_folder
from eagle3_core.jobs.graph import STAGES
from eagle3_core.jobs.spec import parse_job
from eagle3_core.jobs.wire import LogLine, Metric
from eagle3_core.jobs.wire import Progress as StageProgress
from eagle3_core.objects.local import LocalStore

Name = Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(STAGES)}.")]
Job = Annotated[str, typer.Option("--job", help="Job document, JSON or YAML; - reads stdin.")]
Folder = Annotated[Path, typer.Option("--dir", help="Folder for results and the ledger of what ran.")]


class Terminal:
    """A stage's reports on a terminal: a bar, and its log above it."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:g}/{task.total:g} {task.fields[unit]}"),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=aside(), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=1, unit="", note="")

    def __enter__(self) -> Terminal:
        """Begin to show."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        self._bar.stop()

    def progress(self, progress: StageProgress) -> None:
        """Move the bar."""
        self._bar.update(
            self._task, completed=progress.done, total=progress.total, unit=progress.unit, note=progress.note
        )

    def metric(self, metric: Metric) -> None:
        """Show the newest value beside the bar."""
        self._bar.update(self._task, note=f"{metric.name} {metric.value:.4g} at {metric.step}")

    def log(self, line: LogLine) -> None:
        """Print a line above the bar."""
        self._bar.console.print(
            Text(line.text, style={"warning": "yellow", "error": "red"}.get(line.level, "dim")), soft_wrap=True
        )


@command
def stage(
    name: Name, job: Job, folder: Folder = Path(".aerie/stages"), changes: Changes = None, as_json: Json = False
) -> int:
    """Run one stage of a job here, and what it reads if that has not run."""
    if name not in STAGES:
        raise InvalidRequest(f"there is no stage {name!r}", remedy=f"one of {', '.join(STAGES)}")
    spec = parse_job(read_job(job, changes or ()))
    folder = folder.absolute()
    roots = os.environ.get("AERIE_FILE_ROOTS")
    file_roots = [Path(r) for r in roots.split(os.pathsep) if r] if roots else [Path.cwd(), cache_folder(), folder]
    from eagle3_core.stages.chain import Chain  # with all that stages read: no other command needs it

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with Terminal() as terminal:
        chain = Chain(spec, LocalStore(folder / "objects"), folder, file_roots, reporter=terminal, stop=stop)
        outcome = chain.run(STAGES[name].name)
    if as_json:
        document(
            {
                "stage": name, "seconds": outcome.seconds, "units": len(outcome.outputs), "reused_units": outcome.reused,
                "result": outcome.result, "manifests": [output.manifest.model_dump() for output in outcome.outputs],
            }
        )  # fmt: skip
        return 0
    console = people()
    ran = len(outcome.outputs) - outcome.reused
    console.print(f"{name}: {ran} units run, {outcome.reused} reused, {duration(outcome.seconds)}")
    console.print_json(data=outcome.result)
    for output in outcome.outputs:
        console.print(Text(f"manifest {folder / 'objects' / output.manifest.key}"), soft_wrap=True)
    return 0
