"""Exit statuses that scripts can rely on."""

from __future__ import annotations

from eagle3_core.errors import AerieError

OK = 0
FAILED = 1
"""It did not work: the job failed, or something broke."""
INVALID = 2
"""The request is wrong: usage, an invalid job, a job that does not exist or is in another state."""
VERDICT_FAIL = 3
"""It worked, and the drafter is below its gate."""
UNREACHABLE = 4
"""No API answers."""
INTERRUPTED = 130
"""Ended by Ctrl-C."""


class NotReachable(AerieError):
    """No API answers."""

    code, status, retryable = "api.unreachable", 503, True


def status_of(error: AerieError) -> int:
    """The exit status that `error` stands for."""
    if isinstance(error, NotReachable):
        return UNREACHABLE
    return INVALID if 400 <= error.status < 500 else FAILED


def status_of_job(job: dict[str, object]) -> int:
    """The exit status of a finished job."""
    if job["status"] != "succeeded":
        return FAILED
    return VERDICT_FAIL if job.get("verdict") == "fail" else OK
