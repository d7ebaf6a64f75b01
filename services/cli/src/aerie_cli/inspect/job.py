"""`aerie inspect job`: everything the API knows of a job, on one page."""

from __future__ import annotations

import time

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url
from aerie_cli.output import Json, command, document, people
from aerie_cli.report import coloured, duration, job_view
from aerie_cli.watch import JobId


@command
def job(job: JobId, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False) -> int:
    """Show a job's stages, attempts, events and files."""
    with Api.found(url, folder) as api:
        shown = api.get(f"/jobs/{job}")
        attempts = api.get(f"/jobs/{job}/attempts")["data"]
        events = api.get(f"/jobs/{job}/events", limit=1000)["data"]
        artifacts = api.get(f"/jobs/{job}/artifacts")["data"]
    if as_json:
        document({"job": shown, "attempts": attempts, "events": events, "artifacts": artifacts})
        return 0
    console = people()
    console.print(job_view(shown))
    console.print_json(data=shown["spec"])
    table = Table(title="attempts", title_justify="left", box=None, pad_edge=False)
    for name in ("stage", "unit", "attempt", "worker", "outcome", "time", ""):
        table.add_column(name)
    for a in attempts:
        took = duration(a["ended_at"] - a["started_at"]) if a["ended_at"] else ""
        why = (a.get("problem") or {}).get("detail", "")
        outcome = coloured(a["outcome"] or "running")
        table.add_row(a["stage"], str(a["unit"]), str(a["attempt"]), escape(a["worker"]), outcome, took, escape(why))
    console.print(table)
    for event in events:
        at = time.strftime("%H:%M:%S", time.localtime(event["created_at"]))
        console.print(
            Text(f"{at} {event['message']}", style="yellow" if event["level"] != "info" else ""), soft_wrap=True
        )
    for file in artifacts:
        console.print(Text(f"{file['size']:>12,}  {file['blake3'][:16]}  {file['name']}"), soft_wrap=True)
    return 0
