"""Preflight for a service: in confined processes, a few at once.

Whoever posts a job chooses what preflight reads, down to the program that renders conversations. So it runs beside the
service, in processes whose time and memory are bounded; a job that meets the bound is refused by name, and everybody else is
served meanwhile. A process stays up from job to job, since its imports cost more than most looks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any

from eagle3_core.confined import Confined, Limits, Say, Unanswered
from eagle3_core.errors import AerieError
from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.spec import JobSpec

PATIENCE_S = 25.0
"""How much longer than its CPU time a look may take, and how long one waits for a free process."""


class PreflightUnanswered(AerieError):
    """Looking at the job's verifier and data takes more time or memory than a look may, or crashes what reads them."""

    code, status = "preflight.unanswered", 422


class PreflightBusy(AerieError):
    """Too many jobs are being looked at."""

    code, status, retryable = "preflight.busy", 503, True


@dataclass(frozen=True)
class Inspected:
    """What a look found."""

    sources: Mapping[str, str]
    """Digests: of the verifier under `verifier`, of each data set under its URI."""
    warnings: Sequence[str]
    """What is odd but no reason to refuse."""
    train_peak_bytes: int
    """Most memory that training takes."""


class Inspection:
    """Looks at jobs: at most `parallel` at once, at most `waiting` more wait. For any number of threads."""

    def __init__(self, *, cpu_s: float, memory_bytes: int, parallel: int = 4, waiting: int = 12) -> None:
        limits = Limits(cpu_s=cpu_s, wall_s=cpu_s + PATIENCE_S, memory_bytes=memory_bytes)
        self._places = threading.BoundedSemaphore(parallel + waiting)
        self._idle: LifoQueue[Confined] = LifoQueue()
        self._all = [Confined("eagle3_core.jobs.inspection:confined", limits) for _ in range(parallel)]
        for process in self._all:
            self._idle.put(process)

    def __call__(self, spec: JobSpec, file_roots: Sequence[Path]) -> Inspected:
        """What preflight finds. Raises what it raises, PreflightUnanswered, PreflightBusy."""
        if not self._places.acquire(blocking=False):
            raise _busy()
        try:
            process = self._idle.get(timeout=PATIENCE_S)
        except Empty:
            raise _busy() from None
        else:
            try:
                found = process.ask({"spec": spec.model_dump(mode="json"), "file_roots": list(map(str, file_roots))})
            except Unanswered as error:
                raise PreflightUnanswered(
                    f"looking at {error.at} came to no end: {error.why}",
                    remedy="use the files of the model's release and data sets of plain JSON lines; for very large files the "
                    "operator may raise AERIE_PREFLIGHT_CPU_S or AERIE_PREFLIGHT_MEMORY_BYTES",
                    pointer=error.pointer,
                ) from None
            finally:
                self._idle.put(process)
            return Inspected(found["sources"], found["warnings"], found["train_peak_bytes"])
        finally:
            self._places.release()

    def close(self) -> None:
        """End the processes."""
        for process in self._all:
            process.close()


def _busy() -> PreflightBusy:
    return PreflightBusy("too many jobs are being looked at", remedy="post the job again in a few seconds")


def confined(request: Any, say: Say) -> Any:
    """The service of an inspection's process: what preflight finds."""
    spec, roots = JobSpec.model_validate(request["spec"]), [Path(root) for root in request["file_roots"]]
    found = preflight(spec, roots, say)
    return {
        "sources": found.sources,
        "warnings": list(found.warnings),
        "train_peak_bytes": found.train_peak_bytes,
    }
