"""A child whose stages do what the job's metadata says: a program for the tests of whoever feeds and kills children."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from eagle3_core.errors import InvalidRequest
from eagle3_core.jobs.refusals import Preempted
from eagle3_core.jobs.wire import Commit, LogLine
from eagle3_core.stages import child
from eagle3_core.stages.context import StageContext

UNITS = [0]
LOADS = [0]


def load() -> str:
    LOADS[0] += 1
    return "verifier"


def commit(ctx: StageContext, **result: object) -> Commit:
    return ctx.done(ctx.writer().commit(dict(result)), dict(result))


def wait(ctx: StageContext) -> Commit:
    """Work until asked to stop, then save."""
    ctx.progress(0, 1, "steps", note="waiting")
    if not ctx.stop.wait(120):
        raise TimeoutError("nobody asked to stop")
    (Path(ctx.store.root).parent / "saved").write_text("saved")
    ctx.check()
    raise AssertionError("unreachable")


def until_told(ctx: StageContext) -> Commit:
    """Work until SIGUSR1, then say something and finish."""
    told = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: told.set())
    ctx.progress(0, 1, "steps", note="until told")
    if not told.wait(120):
        raise TimeoutError("nobody told")
    ctx.log("said while nobody listened")
    return commit(ctx, unit=UNITS[0])


def stubborn(ctx: StageContext) -> Commit:
    """Ignore SIGTERM, with a process of its own that would outlive it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    offspring = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.alarm(600); signal.pause()"]
    )
    ctx.progress(0, 1, "steps", note=f"stubborn {os.getpid()} {offspring.pid}")
    while True:
        signal.pause()


def run(ctx: StageContext) -> Commit:
    does = ctx.spec.metadata.get("does", "count")
    ctx.warm.get("verifier", load)
    UNITS[0] += 1
    match does:
        case "print":
            sys.stdout.write('{"commit": null}\n')
            os.write(1, b"a library writes to descriptor 1\n")
        case "report":
            ctx.reporter.log(LogLine(at=time.time(), text="hello"))
            ctx.metric("loss", 0.5, 1)
            ctx.progress(9, 9, "steps")
        case "refuse":
            raise InvalidRequest("it has no hat", remedy="give it a hat")
        case "crash":
            return commit(ctx, value=1 // 0)
        case "devour":
            raise MemoryError("32 GiB")
        case "echo":
            return commit(ctx, token=ctx.assignment.token)
        case "until-told":
            return until_told(ctx)
        case "wait":
            return wait(ctx)
        case "stubborn":
            return stubborn(ctx)
        case "litter":
            (ctx.scratch / "deep").mkdir()
            (ctx.scratch / "deep" / "file").write_text("x")
        case "abort":
            sys.stderr.write("about to abort\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        case "talk":
            sys.stderr.write("a library warns\rof this\nand that\n")
            sys.stderr.flush()
        case "preempt":
            raise Preempted("the machine is needed elsewhere")
    return commit(ctx, unit=UNITS[0], loads=LOADS[0])


if __name__ == "__main__":
    child.main(sys.argv[1:], run=run)
