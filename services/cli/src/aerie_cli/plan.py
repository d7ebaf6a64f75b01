"""`aerie plan`: what a job would do, before it runs."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url
from aerie_cli.jobfile import Changes, JobFile, read_job
from aerie_cli.output import Json, command, document, people, plain


@command
def plan(
    file: JobFile, changes: Changes = None, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False
) -> int:
    """Check a job and say which stages it would run and which results it would reuse. Nothing is stored."""
    job = read_job(file, changes or ())
    with Api.found(url, folder) as api:
        planned = api.post("/jobs:plan", job, kind="job.plan")
    if as_json:
        document(planned)
        return 0
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "queue", "units", "reused", "reads"):
        table.add_column(name)
    for stage in planned["stages"]:
        units, reused = stage["units"], stage["reused_units"]
        table.add_row(
            stage["name"], stage["queue"], "later" if units is None else str(units),
            "later" if reused is None else str(reused), ", ".join(stage["reads"]),
        )  # fmt: skip
    console = people()
    console.print(table)
    console.print(Text("later: known when the stages before it are done", style="dim"))
    peak = planned["train_peak_bytes"] / 2**30
    console.print(
        Text(f"training takes at most about {peak:.1f} GiB of memory (of each GPU, if it has some)", style="dim")
    )
    for warning in planned["warnings"]:
        console.print(Text(plain(f"warning: {warning}"), style="yellow"))
    return 0
