"""Exit statuses that scripts can rely on."""

from __future__ import annotations

from eagle3_core.errors import AerieError
from eagle3_core.jobs.refusals import Unreachable

OK = 0
FAILED = 1
"""It did not work: the job failed, or something broke."""
INVALID = 2
"""The request is wrong: usage, an invalid job, a job that does not exist or is in another state, a port in use."""
VERDICT_FAIL = 3
"""It worked, and the drafter is below its gate."""
UNREACHABLE = 4
"""No API answers."""
AGAIN = 75
"""Asked to stop by SIGTERM; what was done is saved, and the same command goes on from there (EX_TEMPFAIL)."""
INTERRUPTED = 130
"""Ended by Ctrl-C."""
READER_GONE = 141
"""Whoever read the output has gone (128 + SIGPIPE, as shells report it)."""


class NotOurs(Unreachable):
    """What answers is not Aerie's API."""

    code, status, retryable = "api.foreign", 502, False


def status_of(error: AerieError) -> int:
    """The exit status that `error` stands for."""
    if isinstance(error, Unreachable):
        return UNREACHABLE
    return INVALID if 400 <= error.status < 500 else FAILED


def status_of_job(job: dict[str, object]) -> int:
    """The exit status of a finished job."""
    if job["status"] != "succeeded":
        return FAILED
    return VERDICT_FAIL if job.get("verdict") == "fail" else OK
