"""`aerie inspect job`: everything the API knows of a job, on one page."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url, job_path
from aerie_cli.output import Json, command, document, people, plain
from aerie_cli.report import clock, coloured, duration, show_job
from aerie_cli.watch import JobId


@command
def job(job: JobId, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False) -> int:
    """Show a job's stages, attempts, events and files."""
    with Api.found(url, folder) as api:
        shown = api.get(job_path(job))
        attempts = api.get(job_path(job, "attempts"), "list")["data"]
        events = api.all(job_path(job, "events"), limit=1000)
        artifacts = api.get(job_path(job, "artifacts"), "list")["data"]
    if as_json:
        document({"job": shown, "attempts": attempts, "events": events, "artifacts": artifacts})
        return 0
    console = people()
    show_job(shown)
    console.print_json(data=plain(shown["spec"]))
    table = Table(title="attempts", title_justify="left", box=None, pad_edge=False)
    for name in ("stage", "unit", "attempt", "worker", "outcome", "time", ""):
        table.add_column(name)
    for a in plain(attempts):
        took = duration(a["ended_at"] - a["started_at"]) if a["ended_at"] else ""
        why = (a.get("problem") or {}).get("detail", "")
        outcome = coloured(a["outcome"] or "running")
        table.add_row(a["stage"], str(a["unit"]), str(a["attempt"]), escape(a["worker"]), outcome, took, escape(why))
    console.print(table)
    for event in plain(events):
        style = "yellow" if event["level"] != "info" else ""
        console.print(Text(f"{clock(event['created_at'])} {event['message']}", style=style), soft_wrap=True)
    for file in plain(artifacts):
        console.print(Text(f"{file['size']:>12,}  {file['blake3'][:16]}  {file['name']}"), soft_wrap=True)
    return 0
