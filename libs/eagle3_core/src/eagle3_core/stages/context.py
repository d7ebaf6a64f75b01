"""What a stage gets besides its configuration: inputs, a place to write, a way to report, a way to be stopped.

Everything that retries, leases, uploads and reports lives around a stage, once, and reaches it through this object.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from eagle3_core.cores import unit_threads, usable_cores
from eagle3_core.jobs.graph import StageName
from eagle3_core.jobs.refusals import Preempted
from eagle3_core.jobs.room import Need, check_room
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.jobs.wire import UNEVEN, Assignment, Commit, LogLine, ManifestRef, Metric, Output, Progress
from eagle3_core.objects.manifest import FileEntry, Manifest, UnitWriter, fetch_file, read_manifest
from eagle3_core.objects.protocol import ObjectStore


class Reporter(Protocol):
    """Where a stage's signs of life go: the child's pipe, a terminal, or nowhere."""

    def progress(self, progress: Progress) -> None:
        """Say how far the unit is."""
        ...

    def metric(self, metric: Metric) -> None:
        """Add a value to a curve."""
        ...

    def log(self, line: LogLine) -> None:
        """Add a line to the unit's log."""
        ...


@runtime_checkable
class Closes(Protocol):
    """What has to be ended before it is let go: an engine's server, which is a process of its own."""

    def close(self) -> None:
        """End it."""
        ...


@dataclass
class Warm:
    """What a process keeps between units: the loaded verifier, by what it was loaded from."""

    held: dict[str, Any] = field(default_factory=dict[str, Any])

    def get(self, key: str, load: Any) -> Any:
        """The thing under `key`; any other is let go before `load()` makes it, so two never share the memory."""
        if key not in self.held:
            self.release()
            self.held[key] = load()
        return self.held[key]

    def release(self) -> None:
        """Let go what is held."""
        while self.held:
            _, kept = self.held.popitem()
            if isinstance(kept, Closes):
                kept.close()


@dataclass
class StageContext:
    """One attempt at one unit, seen from inside its stage."""

    assignment: Assignment
    store: ObjectStore
    scratch: Path
    """Empty folder for temporary files; removed afterwards."""
    reporter: Reporter
    file_roots: tuple[Path, ...]
    """Folders under which `file:` URIs may lie."""
    warm: Warm = field(default_factory=Warm)
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def spec(self) -> JobSpec:
        """The job."""
        return self.assignment.spec

    def check(self) -> None:
        """Raise Preempted once the process was asked to stop. Call it between batches and steps."""
        if self.stop.is_set():
            raise Preempted("asked to stop", remedy="none needed: the unit is queued again")

    def threads(self, fans_out: bool) -> int:
        """CPU threads for this unit: the stage's own setting, else the worker's share for fan-out stages, else all cores."""
        if self.assignment.stage == "train" and self.spec.training.threads:
            return self.spec.training.threads
        own = getattr(self.spec.resources, self.assignment.stage, None)
        if own is not None and own.threads:
            return own.threads
        return unit_threads() if fans_out else usable_cores()

    def progress(
        self, done: float, total: float, unit: str, *, rate: float | None = None, tokens_per_s: float | None = None,
        note: str = "",
    ) -> None:  # fmt: skip
        """Report `done` of `total`, counted in `unit`; `rate` in units per second."""
        self.reporter.progress(
            Progress(done=done, total=total, unit=unit, rate_per_s=rate, tokens_per_s=tokens_per_s, note=note)
        )

    def begin(self, part: str, parts: Sequence[str]) -> None:
        """Say that `part`, one of the `parts` that the unit consists of, begins; honours stops. Says `part` while it lasts."""
        self.check()
        self.progress(parts.index(part), len(parts), UNEVEN, note=part)

    def metric(self, name: str, value: float, step: int) -> None:
        """Add `value` at `step` to the curve `name`. A curve holds numbers: NaN and infinity go to the log instead."""
        if not math.isfinite(value):
            self.log(f"{name} is {value} at step {step}", level="warning")
            return
        self.reporter.metric(Metric(name=name, value=value, step=step))

    def log(self, text: str, level: str = "info") -> None:
        """Say something that a person may want to read later."""
        self.reporter.log(LogLine(at=time.time(), level=level, text=text))  # type: ignore[arg-type]

    def manifests(self, stage: StageName) -> list[Manifest]:
        """The committed manifests of `stage` that this unit reads, in unit order."""
        return [read_manifest(self.store, ref) for ref in self.assignment.inputs.get(stage, [])]

    def fetch(self, entry: FileEntry) -> Path:
        """A file of an input as a local path, verified."""
        return fetch_file(self.store, entry, self.scratch)

    def result(self, stage: StageName) -> dict[str, Any]:
        """The reduced result of a finished stage."""
        return self.assignment.results[stage]

    def require_room(self, need: Need) -> None:
        """Raise StoreTooSmall if the states that this unit is about to make cannot fit; say it if they may not."""
        longest = self.spec.data.regenerate.max_new_tokens
        if (warning := check_room(need, self.store.free_bytes(), longest)) is not None:
            self.log(warning, "warning")

    def writer(self, stage: StageName | None = None, unit_key: str | None = None) -> UnitWriter:
        """Where this unit's output goes; with `stage` and `unit_key`, where the output it makes for another stage goes."""
        a = self.assignment
        return UnitWriter(
            self.store,
            tenant=a.tenant,
            job_id=a.job_id,
            stage=stage or a.stage,
            unit=(a.unit.index, a.unit.start, a.unit.stop),
            unit_key=unit_key or a.key,
            fence=a.fence,
        )

    def done(self, ref: ManifestRef, result: dict[str, Any], also: list[Output] | None = None) -> Commit:
        """The commit of this unit. `seconds` is filled in by whoever runs the stage."""
        own = Output(stage=self.assignment.stage, key=self.assignment.key, manifest=ref, result=result)
        return Commit(output=own, also=also or [], seconds=0.0)
