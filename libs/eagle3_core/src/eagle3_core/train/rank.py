"""One rank of the group that trains: what torchrun runs (see `train.launch`).

    python -m eagle3_core.train.rank FOLDER

SIGTERM to any rank: all save between two steps and leave with 75 (EX_TEMPFAIL). A rank that fails leaves with 1 and
does not wait for the others; torchrun ends them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from eagle3_core.jobs.states import Cause
from eagle3_core.objects.location import store_at
from eagle3_core.stages.chain import Silent
from eagle3_core.stages.child import EX_TEMPFAIL, Channel, PipeReporter, failure_of
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.train import started_drafter, train_at
from eagle3_core.tether import die_with
from eagle3_core.train.launch import ORDER, REPORTS, Ending, Order, ending_of, pid_of
from eagle3_core.train.ranks import join, leave


def main(folder: Path) -> NoReturn:
    """Train as `folder`'s order says, and leave an ending there."""
    die_with(os.getppid())
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    rank = int(os.environ["RANK"])
    pid_of(folder, rank).write_text(str(os.getpid()))
    order = Order.model_validate_json((folder / ORDER).read_text())
    reporter = None
    if rank == 0:
        reporter = PipeReporter(Channel((folder / REPORTS).open("wb")))
    try:
        ranks, device = join(order.device)
        scratch = folder if ranks.first else folder / f"rank-{rank}"
        scratch.mkdir(exist_ok=True)
        ctx = StageContext(
            order.assignment, store_at(order.store), scratch, reporter or Silent(), tuple(order.file_roots), stop=stop
        )
        ending = Ending(at=time.time(), result=train_at(ctx, device, ranks, started_drafter(ctx, folder)))
        status = 0
    except Exception as error:
        failure = failure_of(error, "train")
        ending = Ending(at=time.time(), failure=failure, lost_peer=_lost_peer(error))
        status = EX_TEMPFAIL if failure.cause == Cause.PREEMPTED else 1
    if reporter is not None:
        reporter.close()
    _leave(ending_of(folder, rank), ending)
    if status != 1:
        leave()
    os._exit(status)  # a collective that hangs in a thread of its own must not keep a rank that is done


def _leave(path: Path, ending: Ending) -> None:
    """Write `ending` whole or not at all."""
    temporary = path.with_suffix(".new")
    temporary.write_text(ending.model_dump_json())
    temporary.replace(path)


def _lost_peer(error: Exception) -> bool:
    """Whether `error` says that another rank is gone: NCCL and the store have types for it, gloo has words."""
    gone = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, dist.DistError) or any(words in str(error) for words in gone)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
