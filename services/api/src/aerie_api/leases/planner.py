"""From a job to units: which stage comes next, how it splits, and what of it is known already.

A stage is planned once those before it are done, because its units' keys are made of their contents. A unit whose key
is in the cache is finished at once, without a worker; a stage all of whose units are finished gets its reduced result
and the next one is planned, so a chain of known stages falls through in the transaction that started it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from sqlalchemy.orm import Session

from aerie_api.db import tell
from aerie_api.drafters.repository import DrafterRepository
from aerie_api.drafters.schemas import Figures
from aerie_api.jobs.history import History
from aerie_api.jobs.repository import JobRepository
from aerie_api.leases.endings import fail_job, move
from aerie_api.leases.pausing import pause
from aerie_api.leases.repository import CommitRepository, UnitRepository, living
from aerie_api.leases.spells import ran_s
from aerie_api.metrics import LENGTH, STAGE_SECONDS, once_committed
from aerie_api.storage.budget import Budgets
from aerie_api.tables import CommitRow, Drafter, Job, StageRow, Unit
from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import (
    STAGES,
    Slice,
    StageName,
    queue_of,
    reads_of,
    slices,
    stages_of,
    unit_inputs,
    unit_key,
)
from eagle3_core.jobs.room import Need, check_room, need_of_stage
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.jobs.states import JobStatus, UnitState
from eagle3_core.jobs.wire import Assignment, ManifestRef, UnitSlice
from eagle3_core.objects.protocol import StoreFull, StoreUnavailable

Reduce = Callable[[StageName, JobSpec, list[dict[str, Any]]], dict[str, Any]]
Intact = Callable[[ManifestRef], bool]
MAX_WARNINGS, MAX_WARNING_CHARS = 100, 1000
"""Warnings that a job keeps, and how long one may be."""


class StageResultInvalid(AerieError):
    """A stage's results do not hold what the stages after it need."""

    code, status = "stage.result", 500


@dataclass(frozen=True)
class Known:
    """What finished stages gave: contents of their units in order, and their reduced results."""

    contents: dict[str, list[str]]
    results: dict[StageName, dict[str, Any]]


@dataclass(frozen=True)
class PlannedUnit:
    """A unit to be, and its result if the cache has it."""

    slice: Slice
    key: str
    commit: CommitRow | None


@dataclass(frozen=True)
class StageForecast:
    """What planning can say of a stage before anything runs."""

    name: StageName
    units: int | None
    """Null when it depends on what an earlier stage finds."""
    reused: int | None


class Planner:
    """Moves jobs on. `reduce` joins the results of a stage's units; `intact` says whether a manifest's objects are there,
    `free_bytes` how much room the store has (None: it does not say), `budgets` what tenants may hold in it."""

    def __init__(
        self, reduce: Reduce, intact: Intact, free_bytes: Callable[[], int | None], budgets: Budgets,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._reduce = reduce
        self._intact = intact
        self._free_bytes = free_bytes
        self._budgets = budgets
        self._clock = clock

    def new_stages(self, job: Job, spec: JobSpec) -> list[StageRow]:
        """The stage rows of a new job."""
        return [
            StageRow(job_id=job.id, tenant=job.tenant, name=s.name, position=i, queue=queue_of(s, spec),
                     state=UnitState.PENDING)
            for i, s in enumerate(stages_of(spec))
        ]  # fmt: skip

    def advance(self, session: Session, job: Job) -> None:
        """Move `job` on as far as finished and known units carry it.

        A stage that cannot be planned fails the job, but one for which the tenant's budget has no room lets it wait.
        Raises StoreUnavailable while the store does not say whether a known result is still there.
        """
        spec = JobSpec.model_validate(job.spec)
        stages = JobRepository(session, job.tenant).stages(job.id)
        while living(job):
            stage = next((s for s in stages if s.state != UnitState.SUCCEEDED), None)
            if stage is None:
                return self._succeed(session, job, stages)
            job.stage = stage.name
            try:
                if stage.planned_at is None:
                    self._plan(session, job, spec, stages, stage)
                if not self._finish(session, job, spec, stage):
                    return self._look_at_budget(session, job.tenant)
                if stage is stages[-1]:
                    figures_of(stage)
            except StoreFull as error:
                pause(session, job, error.problem(), self._clock())
                tell(session, "room")  # idle states that can go are let go at once
            except StoreUnavailable:
                raise  # nobody's mistake: the transaction is undone, and who began it asks again
            except AerieError as error:
                fail_job(session, job, stage, error.problem(), self._clock())

    def _look_at_budget(self, session: Session, tenant: str) -> None:
        """Have it seen at once that what `tenant` holds has become too much, while units are left to run."""
        budget = self._budgets.of(session, tenant)
        if budget is not None and budget.excess() > 0:
            tell(session, "room")

    def _plan(self, session: Session, job: Job, spec: JobSpec, stages: Sequence[StageRow], stage: StageRow) -> None:
        now = self._clock()
        name = stage_name(stage.name)
        known = self._known(session, job, stages)
        planned = self._units(session, job.tenant, name, spec, job.sources, known)
        held = CommitRepository(session, job.tenant).use([u.key for u in planned if u.commit is not None], now)
        planned = [u if u.key in held else replace(u, commit=None) for u in planned]
        need = self._need(session, job, spec, name, known, planned)
        if need is not None:
            self._check_room(session, job, spec, need)
        if any(unit.commit is None for unit in planned):
            self._check_budget(session, job.tenant, need)
        for unit in planned:
            session.add(self._unit(job, stage, unit, len(planned), now))
        session.flush()
        stage.planned_at, stage.state = now, UnitState.QUEUED
        tell(session, "work")
        reused = [u.commit.job_id for u in planned if u.commit is not None]
        history = History(session)
        if len(reused) < len(planned):
            left = len(planned) - len(reused)
            history.event(job, now, "stage.planned", f"{name}: {left} of {len(planned)} units to run", stage=name,
                          units=len(planned))  # fmt: skip
        if reused:
            donors = sorted(set(reused))
            of = f"{len(reused)} of {len(planned)} unit{'s' * (len(planned) > 1)}"
            history.event(job, now, "stage.reused", f"{name}: {of} reused from job {', '.join(donors)}", stage=name,
                          units=len(planned), reused=len(reused), jobs=donors)  # fmt: skip

    def _unit(self, job: Job, stage: StageRow, planned: PlannedUnit, of: int, now: float) -> Unit:
        unit = Unit(
            id=f"unit_{secrets.token_hex(12)}", tenant=job.tenant, job_id=job.id, job_number=job.number, rank=job.rank, stage=stage.name,
            position=stage.position, queue=stage.queue, index=planned.slice.index, start=planned.slice.start,
            stop=planned.slice.stop, of=of, key=planned.key, state=UnitState.QUEUED, fence=0, attempt=0, failures=0, losses=0,
            preemptions=0, not_before=0.0,
        )  # fmt: skip
        if planned.commit is not None:
            unit.state, unit.finished_at, unit.seconds = UnitState.SUCCEEDED, now, 0.0
            unit.manifest, unit.result = planned.commit.manifest, planned.commit.result
            unit.reused_from = planned.commit.job_id
        return unit

    def _units(
        self, session: Session, tenant: str, stage: StageName, spec: JobSpec, sources: Mapping[str, str], known: Known
    ) -> list[PlannedUnit]:
        with _typed_errors(stage):
            cut = slices(stage, spec, known.results.get("prepare", {}))
            keys = [
                unit_key(stage, spec, s, unit_inputs(stage, spec, s.index, known.contents), sources, tenant)
                for s in cut
            ]
        if not cut:
            raise StageResultInvalid(f"{stage} has nothing to work on", remedy="give the job more data")
        commits = CommitRepository(session, tenant)
        found = commits.find(keys)
        for key, row in list(found.items()):
            if not self._intact(ManifestRef.model_validate(row.manifest)):
                commits.forget(key)
                del found[key]
        return [PlannedUnit(s, key, found.get(key)) for s, key in zip(cut, keys, strict=True)]

    def _need(
        self, session: Session, job: Job, spec: JobSpec, stage: StageName, known: Known, planned: Sequence[PlannedUnit]
    ) -> Need | None:
        """Before the canary and before hidden states are made: what those need that no other job has left behind."""
        writer: StageName = "generate" if spec.data.regenerate.enabled else "extract"
        if stage not in ("canary", "generate", "extract"):
            return None
        makes = writer if stage == "canary" else stage
        with _typed_errors(makes):
            need, samples = need_of_stage(makes, spec, known.results), int(known.results["prepare"]["samples"])
        if need is None:
            return None
        units = planned if makes == stage else self._units(session, job.tenant, makes, spec, job.sources, known)
        left = sum(unit.slice.stop - unit.slice.start for unit in units if unit.commit is None)
        return need.share(left, samples)

    def _check_room(self, session: Session, job: Job, spec: JobSpec, need: Need) -> None:
        """Raise StoreTooSmall if what is needed cannot fit the store, warn if it may not."""
        warning = check_room(need, self._free_bytes(), spec.data.regenerate.max_new_tokens)
        self._warn(session, job, [warning] if warning else [])

    def _check_budget(self, session: Session, tenant: str, need: Need | None) -> None:
        """Raise StoreFull if `tenant` holds too much to begin a stage, or will with the least that is needed."""
        budget, needed_bytes = self._budgets.of(session, tenant), 0 if need is None else need.least
        if budget is not None and budget.excess(needed_bytes) > 0:
            raise budget.reason(needed_bytes)

    def _warn(self, session: Session, job: Job, warnings: Sequence[str]) -> None:
        """Add what is new of `warnings` to the job's own."""
        new = [text for text in dict.fromkeys(warnings) if text not in job.warnings][: MAX_WARNINGS - len(job.warnings)]
        for text in new:
            History(session).event(job, self._clock(), "job.warning", text, "warning")
        if new:
            job.warnings = [*job.warnings, *new]
            job.version += 1

    def _finish(self, session: Session, job: Job, spec: JobSpec, stage: StageRow) -> bool:
        """Give `stage` its result if every unit has one."""
        units = UnitRepository(session, job.tenant).of_stage(job.id, stage.name)
        if any(unit.state != UnitState.SUCCEEDED for unit in units):
            return False
        name = stage_name(stage.name)
        with _typed_errors(name):
            stage.result = result = self._reduce(name, spec, [unit.result or {} for unit in units])
            said = [str(text)[:MAX_WARNING_CHARS] for text in result.get("warnings") or ()]
        self._warn(session, job, [f"{name}: {text}" for text in said if text not in job.warnings])
        now = self._clock()
        stage.state, stage.finished_at, stage.reason = UnitState.SUCCEEDED, now, None
        stage.started_at = stage.started_at or now
        seconds = ran_s(UnitRepository(session, job.tenant).spells([job.id]).get((job.id, name), ()), now)
        History(session).event(job, now, "stage.succeeded", f"{name}: done", stage=name, seconds=seconds)
        if any(unit.reused_from is None for unit in units):
            once_committed(session, lambda: STAGE_SECONDS.labels(name).observe(seconds))
        return True

    def _succeed(self, session: Session, job: Job, stages: Sequence[StageRow]) -> None:
        now = self._clock()
        figures, digest = figures_of(stages[-1])
        move(job, JobStatus.SUCCEEDED)
        job.started_at, job.finished_at, job.figures = job.started_at or now, now, {**figures, "digest": digest}
        DrafterRepository(session, job.tenant).put(
            Drafter(tenant=job.tenant, name=job.name, job_id=job.id, digest=digest, verdict=figures["verdict"],
                    figures=figures, created_at=now)
        )  # fmt: skip
        once_committed(session, lambda: LENGTH.observe(figures["acceptance_length"]["mean"]))
        message = f"drafter {job.name} is done: verdict {figures['verdict']}"
        History(session).event(job, now, "job.succeeded", message, digest=digest, verdict=figures["verdict"])

    def _known(self, session: Session, job: Job, stages: Sequence[StageRow]) -> Known:
        results = _results(stages)
        contents: dict[str, list[str]] = {name: [] for name in results}
        for unit in UnitRepository(session, job.tenant).of_job(job.id, [UnitState.SUCCEEDED]):
            if (name := stage_name(unit.stage)) in contents:
                contents[name].append((unit.manifest or {})["content"])
        return Known(contents, results)

    def assignment(self, session: Session, job: Job, unit: Unit, token: str, lease_s: float) -> Assignment:
        """What the worker gets that has just taken `unit`."""
        spec, stage = JobSpec.model_validate(job.spec), stage_name(unit.stage)
        inputs, stages = self.inputs(session, job, unit), JobRepository(session, job.tenant).stages(job.id)
        return Assignment(
            unit_run_id=unit.id, job_id=job.id, tenant=job.tenant, stage=stage, attempt=unit.attempt, fence=unit.fence,
            unit=UnitSlice(index=unit.index, start=unit.start, stop=unit.stop, of=unit.of), token=token, key=unit.key,
            spec=spec, sources=job.sources, inputs=inputs, results=_results(stages), lease_s=lease_s,
            traceparent=History(session).traceparent(job.id),
        )  # fmt: skip

    def inputs(self, session: Session, job: Job, unit: Unit) -> dict[StageName, list[ManifestRef]]:
        """What `unit` reads: exactly what its key was made of."""
        spec, stage = JobSpec.model_validate(job.spec), stage_name(unit.stage)
        refs: dict[str, list[str]] = {
            name: [ManifestRef.model_validate(u.manifest).model_dump_json() for u in units]
            for name in reads_of(STAGES[stage], spec)
            for units in [UnitRepository(session, job.tenant).of_stage(job.id, name)]
        }
        return {
            stage_name(name): [ManifestRef.model_validate_json(ref) for ref in chosen]
            for name, chosen in unit_inputs(stage, spec, unit.index, refs).items()
        }

    def forecast(self, session: Session, tenant: str, spec: JobSpec, sources: Mapping[str, str]) -> list[StageForecast]:
        """What a job of `spec` would do: units and what is known of them, as far as that can be told."""
        known, forecast, certain = Known({}, {}), list[StageForecast](), True
        for stage in stages_of(spec):
            if not certain:
                forecast.append(StageForecast(stage.name, self._count(stage.name, spec, known), None))
                continue
            units = self._units(session, tenant, stage.name, spec, sources, known)
            found = [u.commit for u in units if u.commit is not None]
            forecast.append(StageForecast(stage.name, len(units), len(found)))
            certain = len(found) == len(units)
            if certain:
                known.contents[stage.name] = [row.manifest["content"] for row in found]
                with _typed_errors(stage.name):
                    known.results[stage.name] = self._reduce(stage.name, spec, [row.result for row in found])
        return forecast

    def _count(self, stage: StageName, spec: JobSpec, known: Known) -> int | None:
        if STAGES[stage].fans_out and "prepare" not in known.results:
            return None
        with _typed_errors(stage):
            return len(slices(stage, spec, known.results.get("prepare", {})))


def _results(stages: Sequence[StageRow]) -> dict[StageName, dict[str, Any]]:
    """The reduced results of those of `stages` that are done."""
    return {stage_name(s.name): s.result or {} for s in stages if s.state == UnitState.SUCCEEDED}


def stage_name(name: str) -> StageName:
    """`name`, read from the database, as the stage it names."""
    return STAGES[cast("StageName", name)].name


def figures_of(package: StageRow) -> tuple[dict[str, Any], str]:
    """The figures and the drafter's digest in package's result. Raises StageResultInvalid."""
    with _typed_errors("package"):
        result = package.result or {}
        return Figures.model_validate(result["report"]).model_dump(mode="json"), str(result["digest"])


@contextmanager
def _typed_errors(stage: StageName) -> Generator[None]:
    """Turn what a malformed result makes of our code into an error that names the stage."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        detail = f"the results that {stage} builds on are incomplete: {type(error).__name__}: {error}"
        raise StageResultInvalid(detail[:2000], remedy="worker and API must be of one version") from error
