"""`aerie cancel`, `retry`, `pause` and `resume`: change what becomes of a job."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url, job_path
from aerie_cli.output import Json, command, document, people, plain
from aerie_cli.watch import JobId


@command
def cancel(job: JobId, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False) -> int:
    """Stop a job. What runs saves and stops within seconds; finished units are kept for a retry."""
    return _change(job, "cancel", url, folder, as_json)


@command
def retry(job: JobId, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False) -> int:
    """Take a failed or cancelled job up again where it stopped."""
    return _change(job, "retry", url, folder, as_json)


@command
def pause(job: JobId, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False) -> int:
    """Let nothing more of a job begin; what runs saves its work and gives its place to others."""
    return _change(job, "pause", url, folder, as_json)


@command
def resume(job: JobId, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False) -> int:
    """Let a paused job go on."""
    return _change(job, "resume", url, folder, as_json)


def _change(job: str, verb: str, url: str | None, folder: Path, as_json: bool) -> int:
    with Api.found(url, folder) as api:
        changed = api.post(job_path(job, verb))
    if as_json:
        document(changed)
    else:
        people().print(f"{changed['id']}  {escape(plain(changed['name']))}  {changed['status']}")
    return 0
