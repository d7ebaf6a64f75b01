"""Entity tags: a version of a document in sixteen digits, by which a client knows it again (RFC 9110, 8.8.3 and 13.1)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from aerie_api.jobs.schemas import Job
from eagle3_core.digests import digest_bytes
from eagle3_core.errors import AerieError

ENDED_KEPT = 512
"""Documents of some 20 KB each."""


class Changed(AerieError):
    """The job is no longer as the request believes it to be."""

    code, status = "job.changed", 412


@dataclass(frozen=True)
class Shown:
    """A job's document as it is answered."""

    body: bytes
    tag: str
    ended: bool

    @classmethod
    def of(cls, job: Job, version: int) -> Shown:
        """The document `job`, of a row at `version`."""
        body = job.model_dump_json().encode()
        return cls(body, f'"{version}.{digest_bytes(body)[:16]}"', job.status.terminal)


class Ended:
    """Documents of jobs that have ended, by tenant, job and version: what is polled most and changes no more.

    Nothing else of a job's document outlives its version: of a living one the queue, the fleet and the clock speak too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = OrderedDict[tuple[str, str, int], Shown]()

    def get(self, tenant: str, job_id: str, version: int) -> Shown | None:
        """The document, if it is kept."""
        with self._lock:
            return self._kept.get((tenant, job_id, version))

    def keep(self, tenant: str, job_id: str, version: int, shown: Shown) -> None:
        """Keep a document if its job has ended; the one that was kept longest goes for it."""
        if not shown.ended:
            return
        with self._lock:
            self._kept[tenant, job_id, version] = shown
            while len(self._kept) > ENDED_KEPT:
                self._kept.popitem(last=False)


def matches(header: str, tag: str) -> bool:
    """Whether a list of tags (If-Match, If-None-Match) holds `tag`, or everything."""
    known = {part.strip().removeprefix("W/") for part in header.split(",")}
    return tag in known or "*" in known
