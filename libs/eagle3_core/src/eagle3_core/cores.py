"""How many CPU cores this process may use, and how workers beside each other share them.

Units that fan out (generate, extract, evaluate) run beside each other, one in each worker, so a unit gets its worker's
share of the cores and not all of them: on two cores, two workers with one thread each. More threads in fewer workers
would waste cores on small matrices; more workers would each hold the verifier once more. So there are two workers up to
eleven cores and at most four, and all cores are in use either way.

Results depend on the number of threads in their last bits, so it is decided here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from eagle3_core.errors import AerieError

THREADS_VARIABLE = "AERIE_THREADS"
"""Environment variable that tells a worker's child how many threads a unit that fans out gets."""
CORES_PER_WORKER = 4
MOST_WORKERS = 4
CGROUPS = Path("/sys/fs/cgroup")


class BadThreads(AerieError):
    """The number of threads is no number of threads."""

    code, status = "settings.threads", 422


def usable_cores(cgroups: Path = CGROUPS) -> int:
    """Cores that this process may run on: those it is bound to, or fewer where its container has a smaller quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroups)
    return bound if quota is None else max(1, min(bound, quota))


def _quota(cgroups: Path) -> int | None:
    """Whole cores of the container's quota (cgroup v2, else v1), rounded up; None without one."""
    try:
        if (place := cgroups / "cpu.max").exists():
            given, period = place.read_text().split()[:2]
        else:
            given, period = ((cgroups / "cpu" / f"cpu.cfs_{n}_us").read_text() for n in ("quota", "period"))
        return -(-int(given) // int(period)) if int(given) > 0 and int(period) > 0 else None
    except (OSError, ValueError):  # "max", or no such files: no quota
        return None


def default_workers(cores: int) -> int:
    """Workers of a house on `cores` cores."""
    return min(cores, max(2, min(MOST_WORKERS, cores // CORES_PER_WORKER)))


def share(cores: int, workers: int) -> int:
    """Threads for each of `workers` workers' units."""
    return max(1, cores // max(1, workers))


def unit_threads(environment: Mapping[str, str] = os.environ) -> int:
    """Threads of a unit that fans out: what the environment says, else the share of one of the default workers.

    Raises BadThreads.
    """
    stated = environment.get(THREADS_VARIABLE, "").strip()
    if not stated:
        cores = usable_cores()
        return share(cores, default_workers(cores))
    if not stated.isascii() or not stated.isdecimal() or not 1 <= int(stated[:9]) <= 1024:
        raise BadThreads(
            f"{THREADS_VARIABLE} is {stated[:40]!r}", remedy="set it to a number from 1 to 1024, or unset it"
        )
    return int(stated)
