"""`aerie cancel`: stop a job."""

from __future__ import annotations

from rich.markup import escape

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url
from aerie_cli.output import Json, command, document, people
from aerie_cli.watch import JobId


@command
def cancel(job: JobId, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False) -> int:
    """Stop a job. What runs saves and stops within seconds; finished units are kept for a retry."""
    with Api.found(url, folder) as api:
        changed = api.post(f"/jobs/{job}/cancel")
    if as_json:
        document(changed)
    else:
        people().print(f"{changed['id']}  {escape(changed['name'])}  {changed['status']}")
    return 0
