"""The states of jobs, stages and units, and which change into which.

A job's top-level status uses the few words that fine-tuning APIs share; where it stands is said by `stage` and
`stages[]`. A unit's state is what the lease machinery moves.
"""

from __future__ import annotations

from enum import StrEnum

from eagle3_core.errors import AerieError


class JobStatus(StrEnum):
    """Status of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether nothing happens to the job any more unless a person asks."""
        return self in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)


ENDED = frozenset(status for status in JobStatus if status.terminal)
"""Statuses of jobs that have ended."""


class UnitState(StrEnum):
    """State of a unit or of a stage."""

    PENDING = "pending"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    """Waits for its job to be resumed; nobody may claim it."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Cause(StrEnum):
    """Why an attempt ended without a commit. Only `failed` and `worker_lost` use up attempts."""

    FAILED = "failed"
    WORKER_LOST = "worker_lost"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"


JOB_MOVES: dict[JobStatus, frozenset[JobStatus]] = {
    JobStatus.QUEUED: frozenset(
        {JobStatus.RUNNING, JobStatus.PAUSED, JobStatus.CANCELLED, JobStatus.FAILED, JobStatus.SUCCEEDED}
    ),
    JobStatus.RUNNING: frozenset(
        {JobStatus.PAUSED, JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLING, JobStatus.CANCELLED}
    ),
    JobStatus.PAUSED: frozenset(
        {JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.FAILED, JobStatus.CANCELLING, JobStatus.CANCELLED}
    ),
    JobStatus.CANCELLING: frozenset({JobStatus.CANCELLED}),
    JobStatus.SUCCEEDED: frozenset(),
    JobStatus.FAILED: frozenset({JobStatus.QUEUED}),
    JobStatus.CANCELLED: frozenset({JobStatus.QUEUED}),
}
"""Allowed changes of a job's status; failed and cancelled jobs come back only by `retry`, paused ones by `resume`."""


class IllegalMove(AerieError):
    """The job is not in a state that allows this."""

    code, status = "job.state", 409


def check_move(old: JobStatus, new: JobStatus) -> None:
    """Raise IllegalMove unless a job may go from `old` to `new`."""
    if new not in JOB_MOVES[old]:
        raise IllegalMove(
            f"a job that is {old} cannot become {new}",
            remedy="read the job's status first; only failed and cancelled jobs can be retried, only living ones cancelled",
        )
