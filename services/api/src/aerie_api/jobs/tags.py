"""Entity tags: a version of a document in sixteen digits, by which a client knows it again (RFC 9110, 8.8.3 and 13.1)."""

from __future__ import annotations

from aerie_api.jobs.schemas import Job
from eagle3_core.digests import digest_bytes
from eagle3_core.errors import AerieError


class Changed(AerieError):
    """The job is no longer as the request believes it to be."""

    code, status = "job.changed", 412


def tag_of(job: Job, version: int) -> str:
    """The tag of a job's document."""
    return f'"{version}.{digest_bytes(job.model_dump_json().encode())[:16]}"'


def matches(header: str, tag: str) -> bool:
    """Whether a list of tags (If-Match, If-None-Match) holds `tag`, or everything."""
    known = {part.strip().removeprefix("W/") for part in header.split(",")}
    return tag in known or "*" in known
