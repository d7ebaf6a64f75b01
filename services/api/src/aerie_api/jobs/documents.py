"""From rows to the job document.

Nothing in it depends on the moment it is read, only on what workers reported, so equal documents have equal tags and a
poller that knows the tag gets 304. Estimates come from the rates that running units report, which begin when they have
loaded what they need. Without those they come from the pace so far: units done, plus the share that running units report of
theirs; units taken over from other jobs say nothing about pace and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aerie_api.drafters.schemas import AcceptanceLength
from aerie_api.jobs.schemas import DrafterRef, Job, Shards, StageMetric, StageStatus
from aerie_api.jobs.waiting import Fleet, why_waiting
from aerie_api.leases.planner import stage_name
from aerie_api.leases.spells import Spell, ran_s
from aerie_api.leases.turns import Quota
from aerie_api.problems import Problem
from aerie_api.tables import Job as JobRow
from aerie_api.tables import MetricRow, StageRow, Unit
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.jobs.states import JobStatus, UnitState
from eagle3_core.jobs.wire import UNEVEN, Progress

MIN_SHARE = 0.02
"""Share of a stage that must be done before its pace is believed."""
SLOWEST = 1e-9
"""Units a second (one in thirty years) below which a rate is no rate."""


@dataclass(frozen=True)
class Surroundings:
    """What a job's document says beyond the job's own rows."""

    fleet: Fleet
    jobs_ahead: int
    past_seconds: Mapping[str, float]
    """How long each stage ran the last time a worker ran it."""
    quota: Quota | None = None
    """How the tenant stands against its limits."""
    metrics: Mapping[str, Sequence[MetricRow]] | None = None
    """The furthest value of every curve, by stage; null: not looked up."""
    spells: Mapping[str, Sequence[Spell]] = field(default_factory=dict[str, Sequence[Spell]])
    """When attempts at units of each of its stages ran."""


def job_document(job: JobRow, stages: Sequence[StageRow], units: Sequence[Unit], around: Surroundings) -> Job:
    """The document of `job`."""
    spec = JobSpec.model_validate(job.spec)
    shown = [
        stage_status(stage, [u for u in units if u.stage == stage.name], around.spells.get(stage.name, ()))
        for stage in stages
    ]
    if around.metrics is not None:
        shown = [
            s.model_copy(update={"metrics": [_metric(row) for row in around.metrics.get(s.name, ())]}) for s in shown
        ]
    figures: dict[str, Any] = job.figures or {}
    length = figures.get("acceptance_length")
    return Job(
        id=job.id, name=job.name, status=JobStatus(job.status), stage=stage_name(job.stage) if job.stage else None,
        stages=shown, created_at=job.created_at, started_at=job.started_at, finished_at=job.finished_at,
        estimated_finish=_estimated_finish(job, shown, around),
        why_queued=why_waiting(job, units, around.fleet, around.jobs_ahead, around.quota),
        reason=Problem.model_validate(job.reason) if job.reason else None,
        verdict=figures.get("verdict"), reasons=figures.get("reasons"),
        acceptance_length=AcceptanceLength.model_validate(length) if length else None,
        acceptance_length_served=figures.get("acceptance_length_served"), serving=figures.get("serving"),
        acceptance_by_position=figures.get("acceptance_by_position"), lossless=figures.get("lossless"),
        near_tie_share=figures.get("near_tie_share"),
        looping_share=figures.get("looping_share"), seen_ngram_share=figures.get("seen_ngram_share"),
        prompts=figures.get("prompts"), predicted_speedup=figures.get("predicted_speedup"),
        warnings=job.warnings, metadata=dict(spec.metadata), spec=spec,
        drafter=DrafterRef(name=job.name, digest=figures["digest"]) if figures else None,
    )  # fmt: skip


def _metric(row: MetricRow) -> StageMetric:
    return StageMetric(name=row.name, step=row.step, value=row.value)


def stage_status(stage: StageRow, units: Sequence[Unit], spells: Sequence[Spell]) -> StageStatus:
    """The document of one stage, whose attempts ran in `spells`."""
    done = [u for u in units if u.state == UnitState.SUCCEEDED]
    running = [u for u in units if u.state == UnitState.RUNNING]
    reused = [u for u in done if u.reused_from is not None]
    reports = [Progress.model_validate(u.progress) for u in running if u.progress]
    beats = [u.last_heartbeat for u in units if u.last_heartbeat is not None]
    share = _share(units)
    seconds = None if stage.started_at is None else ran_s(spells, max(beats, default=None))
    rates = [r.rate_per_s for r in reports if r.rate_per_s is not None]
    return StageStatus(
        name=stage_name(stage.name), state=UnitState(stage.state), progress_percentage=round(100 * share, 2),
        estimated_remaining_seconds=_remaining(stage, units, reused, seconds, reports),
        shards=Shards(done=len(done), total=len(units)) if stage.planned_at is not None else None,
        reused=bool(units) and len(reused) == len(units), reused_units=len(reused),
        reused_from=sorted({u.reused_from for u in reused if u.reused_from}), seconds=seconds,
        attempt=max((u.attempt for u in units), default=0), workers=sorted({u.worker_id for u in running if u.worker_id}),
        started_at=stage.started_at, finished_at=stage.finished_at, last_heartbeat=max(beats, default=None),
        note=next((r.note for r in reversed(reports) if r.note), ""), rate=sum(rates) if rates else None,
        rate_unit=reports[0].unit if rates else None, result=stage.result,
        reason=Problem.model_validate(stage.reason) if stage.reason else None,
    )  # fmt: skip


def _share(units: Sequence[Unit]) -> float:
    """Done share of `units`, 0 to 1."""
    return sum(_unit_share(u) for u in units) / len(units) if units else 0.0


def _unit_share(unit: Unit) -> float:
    if unit.state == UnitState.SUCCEEDED:
        return 1.0
    if not unit.progress:
        return 0.0
    progress = Progress.model_validate(unit.progress)
    share = progress.done / progress.total if progress.total > 0 else 0.0
    return min(max(share, 0.0), 1.0) if share == share else 0.0


def _remaining(
    stage: StageRow, units: Sequence[Unit], reused: Sequence[Unit], seconds: float | None, reports: Sequence[Progress]
) -> float | None:
    """At the rate that the running units report, which leaves out what they loaded first; else at the stage's pace so far.

    None where there is neither: nothing runs, or what runs counts parts of unlike length.
    """
    if stage.state != UnitState.RUNNING or any(r.unit == UNEVEN for r in reports):
        return None
    if (unit_s := _unit_seconds(units)) is not None:
        return unit_s * sum(1 - _unit_share(u) for u in units)
    share = _share([u for u in units if u not in reused])
    return seconds * (1 - share) / share if seconds and share >= MIN_SHARE else None


def _unit_seconds(units: Sequence[Unit]) -> float | None:
    """Seconds a unit takes while the running ones go on as they say; None unless every one of them says its rate."""
    running = [
        Progress.model_validate(u.progress) if u.progress else None for u in units if u.state == UnitState.RUNNING
    ]
    per_s = [r.rate_per_s / r.total for r in running if r and r.total > 0 and r.rate_per_s is not None]
    told = len(per_s) == len(running) and all(pace > SLOWEST for pace in per_s)
    return 1 / sum(per_s) if per_s and told else None


def _estimated_finish(job: JobRow, stages: Sequence[StageStatus], around: Surroundings) -> float | None:
    if job.status != JobStatus.RUNNING:
        return None
    now = next((s for s in stages if s.state == UnitState.RUNNING), None)
    if now is None or now.estimated_remaining_seconds is None or now.last_heartbeat is None:
        return None
    later = [around.past_seconds.get(s.name) for s in stages if s.state == UnitState.PENDING]
    known = [s for s in later if s is not None]
    return now.last_heartbeat + now.estimated_remaining_seconds + sum(known) if len(known) == len(later) else None
