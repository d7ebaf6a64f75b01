"""`aerie status`: one job, or all."""

from __future__ import annotations

from typing import Annotated

import typer

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url, job_path
from aerie_cli.output import Json, command, document, people
from aerie_cli.report import jobs_table, show_job

OneJob = Annotated[str | None, typer.Argument(metavar="JOB", help="Id of a job; all jobs without it.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=100, help="Newest jobs to list.")]


@command
def status(
    job: OneJob = None, limit: Limit = 20, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False
) -> int:
    """Show where a job stands, or list the newest jobs."""
    with Api.found(url, folder) as api:
        found = api.get("/jobs", "list", limit=limit) if job is None else api.get(job_path(job))
    if as_json:
        document(found)
    elif job is not None:
        show_job(found)
    elif not found["data"]:
        people().print("no jobs yet; post one with `aerie submit FILE`")
    else:
        console = people()
        console.print(jobs_table(found["data"], console.width))
    return 0
