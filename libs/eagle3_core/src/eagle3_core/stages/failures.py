"""How a unit that ended in an exception is reported: typed where it is known, with its traceback where it is not."""

from __future__ import annotations

import errno
import time
import traceback

from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import StageName
from eagle3_core.jobs.refusals import Preempted
from eagle3_core.jobs.states import Cause
from eagle3_core.jobs.wire import Failure, LogLine
from eagle3_core.stages.reports import LOG_TEXT_CHARS

_ROOM: dict[StageName, str] = {
    "canary": "a smaller training.batch_tokens or data.max_seq_len",
    "generate": "a smaller data.regenerate.batch_size",
    "extract": "a smaller data.max_seq_len or data.unit_samples",
    "train": "a smaller training.batch_tokens (raise training.accumulation to keep the batch)",
    "evaluate": "a smaller evaluation.batch_size",
}


class Crashed(AerieError):
    """The stage ended in an error that nobody foresaw."""

    code, status, retryable = "unit.crashed", 500, True


class OutOfMemory(AerieError):
    """The stage needed more memory than the machine or the GPU has."""

    code, status, retryable = "unit.out_of_memory", 507, True


class DiskFull(AerieError):
    """The machine that ran the stage has no room left for its temporary files."""

    code, status, retryable = "unit.disk_full", 507, True


def failure_of(error: Exception, stage: StageName) -> Failure:
    """How a unit that ended in `error` is reported: typed where it is known, with its traceback where it is not."""
    if isinstance(error, Preempted):
        return Failure(cause=Cause.PREEMPTED, problem=error.problem(), retryable=True)
    if isinstance(error, AerieError):
        return Failure(cause=Cause.FAILED, problem=error.problem(), retryable=error.retryable)
    lines = "".join(traceback.format_exception(error)).splitlines()
    logs = [LogLine(at=time.time(), level="error", text=text[:LOG_TEXT_CHARS]) for text in lines[-60:]]
    if _is_out_of_memory(error):
        typed: AerieError = OutOfMemory(
            f"{stage} ran out of memory: {error}"[:1000],
            remedy=f"ask for {_ROOM.get(stage, 'less work at once')}, or run it on a machine with more memory",
        )
    elif _is_disk_full(error):
        typed = DiskFull(
            f"{stage} found no room on its machine's disk: {error}"[:1000],
            remedy="free space where the worker keeps its scratch files, or run it on a machine with a larger disk",
        )
    else:
        typed = Crashed(
            f"{stage} ended in {type(error).__name__}: {error}"[:1000],
            remedy="the unit's log holds the traceback; the unit is tried again before the job fails",
        )
    return Failure(cause=Cause.FAILED, problem=typed.problem(), retryable=True, logs=logs)


def _is_disk_full(error: BaseException) -> bool:
    """Python's way of saying it, and that of libraries that write files themselves (safetensors)."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError) and error.errno in numbers:
        return True
    return type(error).__name__ == "SafetensorError" and any(f"(os error {number})" in str(error) for number in numbers)


def _is_out_of_memory(error: BaseException) -> bool:
    """Python's, CUDA's (torch.OutOfMemoryError) and the CPU allocator's way of saying it, without importing torch."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "not enough memory" in str(error))
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )
