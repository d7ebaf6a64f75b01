"""`aerie stage`: one stage of a job in this process, without a service.

What it reads is run first where it has not run yet; what ran already, with the same inputs and settings, is reused from
the folder. It computes here, so unlike every other command it loads torch (and only here, when the stage needs it).
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from aerie_cli.exits import AGAIN, INTERRUPTED
from aerie_cli.jobfile import Changes, read_job
from aerie_cli.lock import require_writable
from aerie_cli.output import Json, aside, command, document, people, plain, say_error
from aerie_cli.report import duration
from eagle3_core.errors import AerieError, InvalidRequest
from eagle3_core.folders import cache_folder
from eagle3_core.jobs.graph import STAGES
from eagle3_core.jobs.spec import parse_job
from eagle3_core.jobs.wire import LogLine, Metric
from eagle3_core.jobs.wire import Progress as StageProgress
from eagle3_core.objects.local import LocalStore

if TYPE_CHECKING:
    from eagle3_core.stages.chain import Outcome

Name = Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(STAGES)}.")]
Job = Annotated[str, typer.Option("--job", help="Job document, JSON or YAML; - reads stdin.")]
Folder = Annotated[Path, typer.Option("--dir", help="Folder for results and the ledger of what ran.")]


class Stopped(AerieError):
    """The stage was asked to stop before its end; what it had is saved."""

    code, status = "stage.stopped", 503


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
            Text(plain(line.text), style={"warning": "yellow", "error": "red"}.get(line.level, "dim"))
        )


class Stop:
    """What the stage is asked to stop by: the first SIGTERM or Ctrl-C lets it save, a second Ctrl-C ends it where it is."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.status = AGAIN

    def install(self) -> None:
        """Take the process's SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.event.is_set():
                raise KeyboardInterrupt
            self.status = INTERRUPTED
        self.event.set()


@command
def stage(
    name: Name, job: Job, folder: Folder = Path(".aerie/stages"), changes: Changes = None, as_json: Json = False
) -> int:
    """Run one stage of a job here, and what it reads if that has not run. Stopped, it saves; run again, it goes on."""
    if name not in STAGES:
        raise InvalidRequest(f"there is no stage {name!r}", remedy=f"one of {', '.join(STAGES)}")
    spec = parse_job(read_job(job, changes or ()))
    folder = folder.absolute()
    require_writable(folder)
    roots = os.environ.get("AERIE_FILE_ROOTS")
    file_roots = [Path(r) for r in roots.split(os.pathsep) if r] if roots else [Path.cwd(), cache_folder(), folder]
    stop = Stop()
    stop.install()
    from eagle3_core.jobs.refusals import Preempted
    from eagle3_core.stages.chain import Chain  # with all that stages read: no other command needs it

    try:
        with Terminal() as terminal:
            store = LocalStore(folder / "objects")
            chain = Chain(spec, store, folder, file_roots, reporter=terminal, stop=stop.event)
            with closing(chain):
                outcome = chain.run(STAGES[name].name)
    except Preempted:
        say_error(
            Stopped(f"{name} was asked to stop", remedy="run the same command again: it goes on where it was"), as_json
        )
        return stop.status
    tell(name, outcome, folder, as_json)
    return 0


def tell(name: str, outcome: Outcome, folder: Path, as_json: bool) -> None:
    """Print what a stage made."""
    if as_json:
        document(
            {
                "stage": name, "seconds": outcome.seconds, "units": len(outcome.outputs), "reused_units": outcome.reused,
                "result": outcome.result, "manifests": [output.manifest.model_dump() for output in outcome.outputs],
            }
        )  # fmt: skip
        return
    console = people()
    ran = len(outcome.outputs) - outcome.reused
    console.print(f"{name}: {ran} units run, {outcome.reused} reused, {duration(outcome.seconds)}")
    console.print_json(data=plain(outcome.result))
    for output in outcome.outputs:
        console.print(Text(plain(f"manifest {folder / 'objects' / output.manifest.key}")))
