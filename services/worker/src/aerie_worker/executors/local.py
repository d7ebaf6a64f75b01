"""Which child gets the next unit: the warm one where that is safe, else a fresh one.

A child that has loaded a verifier serves every further unit of that verifier without loading it again (12 s of imports
and the weights). On a GPU, memory is what is short: a child that trained still holds its pool, so only the stages that
share a verifier share a child there. On a CPU the kernel gives memory back, and any unit may follow any other.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from aerie_worker.children import ChildProcess, Inbox
from eagle3_core.jobs.wire import Assignment
from eagle3_core.objects.s3_environment import without_store

SHARING = frozenset({"generate", "extract", "evaluate"})
"""Stages that leave nothing on a GPU but the verifier."""

_NOT_FOR_CHILDREN = frozenset(
    f"AERIE_{name}"
    for name in (
        "WORKER_TOKEN_FILE", "BROKER_URL", "BROKER_URL_FILE", "API_KEY", "API_KEY_FILE", "ADMIN_KEY_FILE",
        "DATABASE_URL", "DATABASE_PASSWORD_FILE",
    )
)  # fmt: skip
"""What opens the API, the queue or the database."""
_DEFAULTS = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def fits(last: Assignment | None, following: Assignment, has_gpu: bool) -> bool:
    """Whether the child that ran `last` (None: nothing yet) may run `following`."""
    if last is None or not has_gpu:
        return True
    same_verifier = (last.sources.get("verifier"), last.spec.verifier) == (
        following.sources.get("verifier"), following.spec.verifier,
    )  # fmt: skip
    return same_verifier and last.stage in SHARING and following.stage in SHARING


def machine_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """How many NVIDIA GPUs of this machine a process with this environment may see (CUDA's rule: up to the first that is none)."""
    there = sum(re.fullmatch(r"nvidia\d+", found.name) is not None for found in devices.glob("nvidia*"))
    if (named := environment.get("CUDA_VISIBLE_DEVICES")) is None:
        return there
    seen = itertools.takewhile(lambda name: name not in ("", "-1"), (part.strip() for part in named.split(",")))
    return min(there, len(list(seen)))


def for_children(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child of a worker with this one. Without AERIE_STORE objects are lent to it."""
    told = environment if environment.get("AERIE_STORE") else without_store(environment)
    return _DEFAULTS | {name: value for name, value in told.items() if name not in _NOT_FOR_CHILDREN}


class Local:
    """Keeps one child of this machine."""

    def __init__(
        self, scratch: Path, environment: Mapping[str, str], inbox: Inbox,
        command: Callable[[], list[str]], has_gpu: bool | None = None,
    ) -> None:  # fmt: skip
        """`scratch` is this worker's own folder; what an earlier start left there is removed."""
        shutil.rmtree(scratch, ignore_errors=True)
        self._scratch = scratch
        self._environment = for_children(environment)
        self._inbox = inbox
        self._command = command
        self._has_gpu = machine_gpus(environment) > 0 if has_gpu is None else has_gpu
        self._child: ChildProcess | None = None
        self._last: Assignment | None = None
        self._started = 0

    def warm_up(self) -> None:
        """Start a child ahead of the first unit, so that its imports are done when the unit comes."""
        self._fresh()

    def child_for(self, assignment: Assignment) -> ChildProcess:
        """The child to run `assignment` in."""
        child = self._child
        if child is None or child.spent or not child.alive or not fits(self._last, assignment, self._has_gpu):
            child = self._fresh()
        self._last = assignment
        return child

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.dismiss()
            self._child = None

    def _fresh(self) -> ChildProcess:
        self.close()
        self._started += 1
        folder = self._scratch / f"child-{self._started}"
        self._child, self._last = ChildProcess(self._command(), self._environment, folder, self._inbox), None
        return self._child
