"""Several processes that train one drafter: torchrun starts them, this module tells them what to do and hears the end.

The process that runs the stage stays outside the group and touches no GPU. It writes an order into a folder, starts
torchrun (one machine, no restarts: a checkpoint and the queue are what brings a run back), passes on what rank 0
reports, and passes a stop on to rank 0, from which all ranks learn it between two steps. How each rank ended lies in a
file of its own, so that the first cause is told from what it did to the others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from eagle3_core.errors import AerieError
from eagle3_core.jobs.refusals import Preempted
from eagle3_core.jobs.states import Cause
from eagle3_core.jobs.wire import Assignment, ChildMessage, Failure
from eagle3_core.objects.location import url_of
from eagle3_core.stages.context import Reporter, StageContext
from eagle3_core.tether import tethered

ORDER, REPORTS = "order.json", "reports"
LOOK_EVERY_S = 0.1


class RankLost(AerieError):
    """A process of the group that trains ended without a word."""

    code, status, retryable = "training.rank_lost", 500, True


class Order(BaseModel):
    """What a rank is to do."""

    model_config = ConfigDict(extra="forbid")

    assignment: Assignment
    """The unit, without its secret."""
    store: str
    file_roots: list[Path]
    device: Literal["cpu", "cuda"]


class Ending(BaseModel):
    """How a rank ended."""

    model_config = ConfigDict(extra="forbid")

    at: float
    """Seconds since the epoch."""
    result: dict[str, Any] | None = None
    """Of rank 0: what it has to say of the finished run."""
    failure: Failure | None = None
    lost_peer: bool = False
    """Whether it failed because another rank was gone."""


def ending_of(folder: Path, rank: int) -> Path:
    """Where a rank leaves its ending."""
    return folder / f"rank-{rank}.json"


def pid_of(folder: Path, rank: int) -> Path:
    """Where a rank leaves its process id, once it can be signalled."""
    return folder / f"rank-{rank}.pid"


def launch(ctx: StageContext, folder: Path, ranks: int, device: Literal["cpu", "cuda"]) -> dict[str, Any]:
    """Train `ctx`'s unit in `ranks` processes that work in the folder `folder`; what rank 0 says of it.

    Raises Preempted, RankLost, and what a rank raised.
    """
    order = Order(
        assignment=ctx.assignment.model_copy(update={"token": ""}), store=url_of(ctx.store),
        file_roots=list(ctx.file_roots), device=device,
    )  # fmt: skip
    (folder / ORDER).write_text(order.model_dump_json())
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--max-restarts", "0",
        "--nproc-per-node", str(ranks), "-m", "eagle3_core.train.rank", str(folder),
    ]  # fmt: skip
    threads = max(1, ctx.threads(fans_out=False) // ranks)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with _passed_on(folder / REPORTS, ctx.reporter):
        process = subprocess.Popen(tethered(command), env=environment, stdin=subprocess.DEVNULL)  # noqa: S603
        try:
            _watch(process, ctx.stop, pid_of(folder, 0))
        finally:
            process.kill()  # torchrun takes its ranks along: they are tethered to it
            process.wait()
    return _told(folder, ranks, process.returncode, ctx.reporter)


def _watch(process: subprocess.Popen[bytes], stop: threading.Event, first_rank: Path) -> None:
    """Wait for torchrun's end; once asked to stop, tell rank 0 (when it can hear) and go on waiting."""
    told = False
    while process.poll() is None:
        asked = stop.is_set()
        if asked and not told and first_rank.exists():
            os.kill(int(first_rank.read_text()), signal.SIGTERM)
            told = True
        if asked:
            threading.Event().wait(LOOK_EVERY_S)
        else:
            stop.wait(LOOK_EVERY_S)


@contextmanager
def _passed_on(path: Path, reporter: Reporter) -> Generator[None]:
    """A named pipe at `path`: what is written there as messages of a child reaches `reporter`."""
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(path, os.O_WRONLY)  # as long as it is open, the reader sees no end
    os.set_blocking(reading, True)

    def read() -> None:
        with os.fdopen(reading, "rb") as lines:
            for line in lines:
                message = ChildMessage.model_validate_json(line)
                if message.progress is not None:
                    reporter.progress(message.progress)
                if message.metric is not None:
                    reporter.metric(message.metric)
                if message.log is not None:
                    reporter.log(message.log)

    thread = threading.Thread(target=read, name="rank reports")
    thread.start()
    try:
        yield
    finally:
        os.close(writing)
        thread.join()


def _told(folder: Path, ranks: int, status: int, reporter: Reporter) -> dict[str, Any]:
    """Rank 0's result, or the first cause of why there is none."""
    paths = {rank: ending_of(folder, rank) for rank in range(ranks)}
    endings = {rank: Ending.model_validate_json(path.read_text()) for rank, path in paths.items() if path.exists()}
    if 0 in endings and (result := endings[0].result) is not None:
        return result
    failed = sorted((e.at, rank, e.failure) for rank, e in endings.items() if e.failure is not None and not e.lost_peer)
    for _, rank, failure in failed:
        for line in failure.logs:
            reporter.log(line.model_copy(update={"text": f"rank {rank}: {line.text}"}))
    causes = [failure for _, _, failure in failed if failure.cause != Cause.PREEMPTED]
    if causes:
        raise AerieError.from_problem(causes[0].problem)
    if failed:
        raise Preempted("asked to stop", remedy="none needed: the unit is queued again")
    silent = ", ".join(str(rank) for rank in paths if rank not in endings)
    raise RankLost(
        f"rank {silent} of {ranks} ended without a word (torchrun: exit status {status}; it ends the ranks that wait for "
        "a lost one)",
        remedy="the worker's log holds torchrun's words; often the machine's memory ran out. The unit is tried again "
        "from its last checkpoint",
    )
