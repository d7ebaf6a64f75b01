"""Checks what a worker reports before it is written to the database.

A commit names objects. Its manifest is read and the files in it are looked up before any row is written, so the database
never refers to an object that does not exist. A commit also names keys: each must be the unit's own key or, for output that
it made for another stage on the way, the key that the planner will look for. Otherwise the cache would serve wrong results,
or never serve these.
"""

from __future__ import annotations

from typing import Any

from aerie_api.problems import Problem
from aerie_api.tables import Job, Unit
from eagle3_core.digests import canonical
from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import Slice, unit_key
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.jobs.wire import Commit, Failure, ManifestRef, Output
from eagle3_core.objects.keys import Attempt, foreign, owner_of
from eagle3_core.objects.manifest import Manifest, read_manifest
from eagle3_core.objects.protocol import BadKey, ObjectDamaged, ObjectMissing, ObjectStore

MAX_PROBLEM_BYTES = 64 << 10


class CommitRefused(AerieError):
    """A commit names what is not there, or what is not its unit's."""

    code, status = "commit.refused", 422


class FailureUnclear(AerieError):
    """A worker reported a failure in words that cannot be kept."""

    code, status = "unit.failed", 500


class Vetting:
    """Checks of commits and failures against the object store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def intact(self, ref: ManifestRef) -> bool:
        """Whether the manifest at `ref` and every file that it lists are there, whole by size."""
        try:
            self._present(ref)
        except (ObjectMissing, ObjectDamaged, BadKey):
            return False
        return True

    def _present(self, ref: ManifestRef) -> Manifest:
        manifest = read_manifest(self._store, ref)
        for entry in manifest.files:
            if (size := self._store.stat(entry.key).size) != entry.size:
                raise ObjectDamaged(
                    f"{entry.key} has {size} bytes, its manifest says {entry.size}",
                    remedy="run the stage that writes it again",
                )
        return manifest

    def objects(self, commit: Commit) -> dict[str, int]:
        """Raise CommitRefused unless all that `commit` names is in the store and says the same of itself.

        Returns how many bytes lie behind each manifest, by the manifest's key.
        """
        sizes: dict[str, int] = {}
        for output in (commit.output, *commit.also):
            try:
                manifest = self._present(output.manifest)
                canonical(output.result)
            except (ObjectMissing, ObjectDamaged, BadKey) as error:
                raise CommitRefused(
                    f"the output of {output.stage}: {error.detail}",
                    remedy="worker and API must use one object store (AERIE_STORE)",
                ) from error
            except (ValueError, TypeError) as error:
                raise CommitRefused(
                    f"the result of {output.stage} is not plain JSON: {error}",
                    remedy="a stage's result holds finite numbers, text, lists and objects only",
                ) from error
            _agree(output, manifest)
            sizes[output.manifest.key] = sum(entry.size for entry in manifest.files)
        return sizes

    def keys(self, commit: Commit, job: Job, unit: Unit) -> None:
        """Raise CommitRefused unless `commit` is for `unit`, and what it brings along is what will be looked for."""
        if (commit.output.stage, commit.output.key) != (unit.stage, unit.key):
            raise CommitRefused(
                f"the commit is for {commit.output.stage} {commit.output.key[:16]}, the unit is {unit.stage} {unit.key[:16]}",
                remedy="commit what was assigned",
            )
        for output in (commit.output, *commit.also):
            own = Attempt(job.tenant, output.stage, job.id, unit.index, unit.fence)
            if owner_of(output.manifest.key) != own:
                raise CommitRefused(
                    f"the manifest {output.manifest.key} is not of this attempt, whose keys begin with {own.prefix}",
                    remedy="commit what this attempt wrote",
                )
        for output in commit.also:
            want = _companion_key(job, unit, commit)
            if output.stage != "extract" or output.key != want:
                raise CommitRefused(
                    f"{unit.stage} unit {unit.index} brings {output.stage} under {output.key[:16]}; "
                    f"extract's unit of these answers will be looked for under {want[:16] if want else 'no key'}",
                    remedy="only generate brings states along, under the key of jobs.graph.unit_key; "
                    "worker and API must be of one version",
                )

    def problem(self, failure: Failure) -> dict[str, Any]:
        """The failure's problem document, or one that says that it could not be kept."""
        try:
            size = len(canonical(failure.problem))
            Problem.model_validate(failure.problem)
        except (ValueError, TypeError) as error:
            why = f"is not one: {str(error)[:500]!r}"
        else:
            if size <= MAX_PROBLEM_BYTES and "code" in failure.problem:
                return failure.problem
            why = (
                f"has {size} bytes, at most {MAX_PROBLEM_BYTES} are kept"
                if "code" in failure.problem
                else "has no code"
            )
        return FailureUnclear(f"the worker's problem document {why}", remedy="see the worker's own log").problem()


def _agree(output: Output, manifest: Manifest) -> None:
    if (manifest.stage, manifest.unit_key) != (output.stage, output.key):
        raise CommitRefused(
            f"the commit says {output.stage} {output.key[:16]}, its manifest {manifest.stage} {manifest.unit_key[:16]}",
            remedy="write a manifest for every unit",
        )
    own = owner_of(output.manifest.key)
    keys = [entry.key for entry in manifest.files]
    strangers = foreign(keys, own) if isinstance(own, Attempt) else [output.manifest.key]
    if strangers:
        raise CommitRefused(
            f"the manifest {output.manifest.key} lists objects that its attempt did not write: {', '.join(strangers[:3])}",
            remedy="a manifest lists what its own attempt wrote, and nothing else",
        )


def _companion_key(job: Job, unit: Unit, commit: Commit) -> str | None:
    """The key under which extract will look for the states of this unit's answers."""
    if unit.stage != "generate":
        return None
    spec = JobSpec.model_validate(job.spec)
    inputs = {"generate": [commit.output.manifest.content]}
    return unit_key("extract", spec, Slice(unit.index, unit.start, unit.stop), inputs, job.sources, job.tenant)
