"""`aerie retry`: take a job up again."""

from __future__ import annotations

from rich.markup import escape

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url
from aerie_cli.output import Json, command, document, people
from aerie_cli.watch import JobId


@command
def retry(job: JobId, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False) -> int:
    """Take a failed or cancelled job up again where it stopped."""
    with Api.found(url, folder) as api:
        changed = api.post(f"/jobs/{job}/retry")
    if as_json:
        document(changed)
    else:
        people().print(f"{changed['id']}  {escape(changed['name'])}  {changed['status']}")
    return 0
