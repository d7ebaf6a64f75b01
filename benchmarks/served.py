"""The API whose speed and memory `service.py` measures: as `python -m aerie_api` runs it, but for two parts.

The look at a posted job's verifier and data and the reduction of results would measure something else, so they are
replaced. Nothing is imported here that the API does not import itself: what the kernel says of this process is said of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aerie_api.house import House, Parts
from aerie_api.server import Server, listen
from aerie_api.settings import read_settings
from eagle3_core.digests import digest_bytes
from eagle3_core.jobs.graph import StageName
from eagle3_core.jobs.spec import JobSpec


def looked(spec: JobSpec, _roots: Sequence[Path]) -> Any:
    """What preflight would find."""
    digest = digest_bytes(spec.name.encode())  # of its own for each job, so that none reuses another's results
    uris = [d.uri for d in (*spec.datasets, *spec.evaluation.prompts)]
    sources = {"verifier": digest, **dict.fromkeys(uris, digest)}
    return SimpleNamespace(sources=sources, warnings=[], train_peak_bytes=1 << 30)


def reduced(_stage: StageName, _spec: JobSpec, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a stage whose units all say the same."""
    return results[0]


def main() -> None:
    """Serve until told to stop."""
    settings = read_settings()
    with closing(listen(settings)) as listening:
        Server(House(settings, Parts(preflight=looked, reduce=reduced)), listening).run(sockets=[listening])


if __name__ == "__main__":
    main()
