"""`aerie submit`: post a job."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url
from aerie_cli.exits import status_of_job
from aerie_cli.jobfile import Changes, JobFile, read_job
from aerie_cli.output import Json, command, document, people, plain, remark
from aerie_cli.report import show_job
from aerie_cli.watch import follow_or_leave

Key = Annotated[str | None, typer.Option("--idempotency-key", help="The same key and job again is the same job.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show its progress until it ends.")]


@command
def submit(
    file: JobFile, changes: Changes = None, idempotency_key: Key = None, watch: Watch = False, url: Url = None,
    folder: Dir = DEFAULT_DIR, as_json: Json = False,
) -> int:  # fmt: skip
    """Post a job. Prints its document (--json) or its id."""
    job = read_job(file, changes or ())
    with Api.found(url, folder) as api:
        posted = api.post("/jobs", job, {"Idempotency-Key": idempotency_key} if idempotency_key else None)
        if watch:
            remark(f"posted {posted['id']} as {posted['name']}")
        finished = follow_or_leave(api, posted["id"]) if watch else None
    if finished is None:
        if as_json:
            document(posted)
        else:
            people().print(f"{posted['id']}  {escape(plain(posted['name']))}  {posted['status']}")
        return 0
    if as_json:
        document(finished)
    else:
        show_job(finished)
    return status_of_job(finished)
