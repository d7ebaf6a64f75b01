"""A job's stages one after the other in this process: no queue, no lease, the same units, keys and bytes as a service.

It serves `aerie stage`, where a person runs one stage by hand, and the canary. A ledger in the working folder remembers
commits by their keys, so a stage that ran is not run again, and one whose inputs or settings changed is.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from eagle3_core import strict_json
from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import STAGES, Slice, StageName, reads_of, slices, stages_of, unit_inputs, unit_key
from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.results import reduce
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.jobs.wire import Assignment, Commit, LogLine, ManifestRef, Metric, Output, Progress, UnitSlice
from eagle3_core.objects.protocol import ObjectMissing, ObjectStore
from eagle3_core.stages import registry
from eagle3_core.stages.context import Reporter, StageContext, Warm

NO_LEASE_S = float(1 << 31)


class NotInJob(AerieError):
    """The job has no such stage."""

    code, status = "stage.absent", 422


class LedgerDamaged(AerieError):
    """The list of stages that ran cannot be read."""

    code, status = "stage.ledger", 500


class Silent:
    """A reporter that tells nobody."""

    def progress(self, progress: Progress) -> None:
        """Ignore progress."""

    def metric(self, metric: Metric) -> None:
        """Ignore a metric."""

    def log(self, line: LogLine) -> None:
        """Ignore a line."""


@dataclass(frozen=True)
class Outcome:
    """A finished stage."""

    stage: StageName
    outputs: list[Output]
    """One for each unit, in order."""
    result: dict[str, Any]
    """The units' results, reduced."""
    reused: int
    """Units that an earlier run had done."""
    seconds: float


class Ledger:
    """Commits by unit key, in one file that is replaced whole: a crash leaves the old one or the new one."""

    def __init__(self, path: Path) -> None:
        """Raises LedgerDamaged that names the file."""
        self._path = path
        self._entries: dict[str, Output] = {}
        if path.is_file():
            try:
                stated = strict_json.loads_object(path.read_bytes())
                self._entries = {key: Output.model_validate(v) for key, v in stated.items()}
            except ValueError as error:
                raise LedgerDamaged(
                    f"{path} is no list of what ran: {error}",
                    remedy="delete it: the stages run once more, to the same end",
                ) from None

    def get(self, key: str, store: ObjectStore) -> Output | None:
        """What was committed under `key`, if its manifest still exists."""
        if (output := self._entries.get(key)) is None:
            return None
        try:
            store.stat(output.manifest.key)
        except ObjectMissing:
            return None
        return output

    def put(self, outputs: Sequence[Output]) -> None:
        """Remember `outputs` under their keys."""
        self._entries |= {output.key: output for output in outputs}
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps({k: v.model_dump(mode="json") for k, v in self._entries.items()}, indent=1))
        temporary.replace(self._path)


class Chain:
    """The stages of one job over one store, with a ledger in `folder`."""

    def __init__(
        self, spec: JobSpec, store: ObjectStore, folder: Path, file_roots: Sequence[Path], *, tenant: str = "default",
        job_id: str | None = None, sources: Mapping[str, str] | None = None, reporter: Reporter | None = None,
        warm: Warm | None = None, stop: threading.Event | None = None,
    ) -> None:  # fmt: skip
        """`sources` are the digests of verifier and data sets; None takes them from a preflight, which may refuse."""
        folder.mkdir(parents=True, exist_ok=True)
        self.spec = spec
        self._store = store
        self._folder = folder
        self._file_roots = tuple(file_roots)
        self._tenant = tenant
        self._job_id = job_id or spec.name
        self.reporter: Reporter = reporter or Silent()
        self._sources = dict(sources) if sources is not None else self._preflight()
        self._warm, self._own_warm = warm or Warm(), warm is None
        self._stop = stop or threading.Event()
        self._ledger = Ledger(folder / "ledger.json")
        self._outcomes: dict[StageName, Outcome] = {}

    def _preflight(self) -> dict[str, str]:
        checked = preflight(self.spec, self._file_roots)
        for warning in checked.warnings:
            self.reporter.log(LogLine(at=time.time(), level="warning", text=warning))
        return dict(checked.sources)

    def close(self) -> None:
        """Let go what was kept between stages, where this chain keeps it."""
        if self._own_warm:
            self._warm.release()

    def seed(self, name: StageName, outputs: list[Output]) -> None:
        """Take `outputs` (one for each unit) as the result of stage `name` instead of running it."""
        result = reduce(name, self.spec, [output.result for output in outputs])
        self._outcomes[name] = Outcome(name, outputs, result, len(outputs), 0.0)

    def run(self, name: StageName) -> Outcome:
        """Stage `name`, after the stages it reads; what the ledger knows is not run again. Raises what stages raise."""
        if name in self._outcomes:
            return self._outcomes[name]
        if name not in {stage.name for stage in stages_of(self.spec)}:
            raise NotInJob(f"this job has no stage {name}", remedy="set data.regenerate.enabled to have `generate`")
        for upstream in reads_of(STAGES[name], self.spec):
            self.run(upstream)
        prepared = {} if name == "prepare" else self.run("prepare").result
        units = slices(name, self.spec, prepared)
        started, reused, outputs = time.perf_counter(), 0, list[Output]()
        for unit in units:
            output, known = self._unit(name, unit, len(units))
            outputs.append(output)
            reused += known
        result = reduce(name, self.spec, [output.result for output in outputs])
        self._outcomes[name] = Outcome(name, outputs, result, reused, time.perf_counter() - started)
        return self._outcomes[name]

    def _unit(self, name: StageName, unit: Slice, of: int) -> tuple[Output, bool]:
        """The output of one unit, and whether it was there already."""
        upstream: dict[StageName, list[Output]] = {
            read: self._outcomes[read].outputs for read in reads_of(STAGES[name], self.spec)
        }
        digests = {read: [output.manifest.content for output in outputs] for read, outputs in upstream.items()}
        inputs = unit_inputs(name, self.spec, unit.index, digests)
        key = unit_key(name, self.spec, unit, inputs, self._sources, self._tenant)
        if (known := self._ledger.get(key, self._store)) is not None:
            return known, True
        refs: dict[StageName, list[ManifestRef]] = {}
        for read, outputs in upstream.items():
            if (wanted := inputs.get(read)) is not None:  # all its units, or for extract the one of the same index
                chosen = outputs if len(wanted) == len(outputs) else [outputs[unit.index]]
                refs[read] = [output.manifest for output in chosen]
        commit = self._attempt(name, unit, of, key, refs)
        self._ledger.put([commit.output, *commit.also])
        return commit.output, False

    def _attempt(
        self, name: StageName, unit: Slice, of: int, key: str, inputs: dict[StageName, list[ManifestRef]]
    ) -> Commit:
        assignment = Assignment(
            unit_run_id=f"{self._job_id}-{name}-{unit.index}", job_id=self._job_id, tenant=self._tenant, stage=name,
            unit=UnitSlice(index=unit.index, start=unit.start, stop=unit.stop, of=of), attempt=1, fence=1, token="",
            key=key, spec=self.spec, sources=self._sources, inputs=inputs,
            results={stage: outcome.result for stage, outcome in self._outcomes.items()}, lease_s=NO_LEASE_S,
        )  # fmt: skip
        with TemporaryDirectory(prefix=f"{name}-", dir=self._folder) as scratch:
            return registry.run(
                StageContext(
                    assignment, self._store, Path(scratch), self.reporter, self._file_roots, self._warm, self._stop
                )
            )
