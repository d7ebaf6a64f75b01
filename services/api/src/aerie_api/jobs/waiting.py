"""Why nothing of a job runs although it could: one sentence, the nearest cause first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aerie_api.leases.turns import Quota
from aerie_api.tables import Job, Unit
from eagle3_core.jobs.graph import ON_SGLANG
from eagle3_core.jobs.states import JobStatus, UnitState

GET_ENGINE = (
    "run `make setup-sglang` on a worker's machine, or let the worker's AERIE_SGLANG_PYTHON name an interpreter that has it,"
    " and start the worker again"
)


@dataclass(frozen=True)
class Fleet:
    """The workers seen lately, as far as a waiting unit cares."""

    serving: frozenset[str]
    """Queues that workers serve which may be given work."""
    aside: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """By queue, the workers that would serve it had they not been set aside."""


def why_waiting(job: Job, units: Sequence[Unit], fleet: Fleet, jobs_ahead: int, quota: Quota | None) -> str | None:
    """Why nothing of a living `job` runs; None if something does or nothing is to be done."""
    if job.status == JobStatus.PAUSED:
        return (job.reason or {}).get("detail", "paused")
    waiting = [u for u in units if u.state == UnitState.QUEUED]
    if job.status not in (JobStatus.QUEUED, JobStatus.RUNNING) or not waiting:
        return None
    if any(u.state == UnitState.RUNNING for u in units):
        return None
    first = waiting[0]
    if first.queue not in fleet.serving:
        return _nobody(first.queue, first.stage, fleet)
    if quota is not None and (limit := quota.stands_in_the_way(started=job.status == JobStatus.RUNNING)):
        return limit
    if first.failures or first.losses:
        return f"{first.stage} unit {first.index} is tried again after a pause"
    if jobs_ahead:
        return f"{jobs_ahead} job{'s' * (jobs_ahead > 1)} of this tenant first"
    return "the workers that could take it are busy, or about to ask for work"


def unserved(stages: Iterable[tuple[str, str]], fleet: Fleet) -> Iterator[str]:
    """A sentence for each queue that no worker serves, of a job whose `stages` (name, queue) would run."""
    first = {queue: stage for stage, queue in reversed(list(stages))}
    yield from dict.fromkeys(
        _nobody(queue, stage, fleet) for queue, stage in reversed(first.items()) if queue not in fleet.serving
    )


def _nobody(queue: str, stage: str, fleet: Fleet) -> str:
    engine = queue in ON_SGLANG.values()
    if not fleet.serving and not fleet.aside and not engine:  # as in the first seconds of a house
        return "no worker is there yet; those that `aerie up` starts take some seconds, elsewhere start one"
    need = f"no worker{' with SGLang' * engine} serves queue {queue!r}, which {stage} needs"
    if aside := fleet.aside.get(queue):
        names = ", ".join(sorted(aside)[:3]) + (", ..." if len(aside) > 3 else "")
        return f"{need}: {names} set aside after failing unit after unit; GET /workers says why"
    if engine:
        return f"{need}; {GET_ENGINE}"
    return f"{need}; start one with `aerie up`"
