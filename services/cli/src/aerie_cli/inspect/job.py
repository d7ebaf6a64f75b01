"""`aerie inspect job`: everything the API knows of a job, on one page, and decoded samples of what its drafter is trained on.

The samples come from the job's hidden states, if their store is a folder that this command can read (`objects` of the embedded
house). They are decoded as `aerie inspect shard` does it, so a wrong mask or a wrong template shows here already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url, job_path
from aerie_cli.inspect.shard import Samples, Verifier, describe, find, find_tokenizer, print_samples
from aerie_cli.output import Json, command, document, people, plain
from aerie_cli.report import clock, coloured, duration, show_job
from eagle3_core.data.sources import path_of
from eagle3_core.errors import AerieError, InvalidRequest

JobOrName = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job, or a name that only one job has.")]
_MAX_NAME = 64


@command
def job(
    job: JobOrName,
    samples: Samples = 2,
    verifier: Verifier = None,
    url: Url = None,
    folder: Dir = DEFAULT_DIR,
    as_json: Json = False,
) -> int:
    """Show a job's stages, attempts, events and files, decoded samples with what of them is supervised, and its spec."""
    with Api.found(url, folder) as api:
        job = find_job(api, job)
        shown = api.get(job_path(job))
        attempts = api.get(job_path(job, "attempts"), "list")["data"]
        events = api.all(job_path(job, "events"), limit=1000)
        artifacts = api.get(job_path(job, "artifacts"), "list")["data"]
    first, remark = in_words(shown, folder / "objects", samples, verifier)
    if as_json:
        told: dict[str, Any] = {"job": shown, "attempts": attempts, "events": events, "artifacts": artifacts}
        document({**told, "samples": first, "samples_remark": remark})
        return 0
    console = people()
    show_job(shown)
    console.print(_attempts_table(attempts))
    for event in plain(events):
        style = "yellow" if event["level"] != "info" else ""
        console.print(Text(f"{clock(event['created_at'])} {event['message']}", style=style))
    for file in plain(artifacts):
        console.print(Text(f"{file['size']:>12,}  {file['blake3'][:16]}  {file['name']}"))
    print_samples(plain(first or []))
    if remark:
        console.print(Text(plain(remark), style="yellow"))
    # The document comes last: it is the longest, and the least asked for.
    console.print(Text("as posted, with every default", style="bold"))
    console.print_json(data=plain(shown["spec"]))
    return 0


def find_job(api: Api, asked: str) -> str:
    """The id of the job that `asked` names: an id, or the name of one job. Raises InvalidRequest for what
    is neither, and where several are called so."""
    job_path(asked)  # what is neither is refused before anything is asked; every name could be an id
    if re.fullmatch(r"job_[0-9a-f]+", asked) or len(asked) > _MAX_NAME:
        return asked
    found = plain(api.get("/jobs", "list", name=asked)["data"])
    if len(found) > 1:
        each = ", ".join(f"{one['id']} ({one['status']})" for one in found[:5]) + (", ..." if len(found) > 5 else "")
        raise InvalidRequest(
            f"several jobs are called {asked!r}: {each}", remedy="name the one that you mean by its id"
        )
    return found[0]["id"] if found else asked


def _attempts_table(attempts: list[dict[str, Any]]) -> Table:
    """One row an attempt."""
    table = Table(title="attempts", title_justify="left", box=None, pad_edge=False)
    for name in ("stage", "unit", "attempt", "worker", "outcome", "time", ""):
        table.add_column(name)
    for a in plain(attempts):
        took = duration(a["ended_at"] - a["started_at"]) if a["ended_at"] else ""
        why = (a.get("problem") or {}).get("detail", "")
        outcome = coloured(a["outcome"] or "running")
        table.add_row(a["stage"], str(a["unit"]), str(a["attempt"]), escape(a["worker"]), outcome, took, escape(why))
    return table


def in_words(
    job: dict[str, Any], objects: Path, samples: int, verifier: Path | None
) -> tuple[list[dict[str, Any]] | None, str]:
    """The first `samples` of what `job` trains on, decoded, and what is to be said of them; null where none are at hand."""
    manifest = next(manifests(job, objects), None)
    if manifest is None:
        return None, f"no samples to show: {objects} holds no hidden states of this job"
    try:
        model = path_of(str(job["spec"]["verifier"]["model"]))
        found = find(manifest)[0]
        tokenizer, warning = find_tokenizer(found.contract, manifest, verifier or model, None, objects.parent)
        return describe(found, tokenizer, samples)["first"], warning
    except AerieError as error:
        return None, f"no samples to show: {error.detail}"


def manifests(job: dict[str, Any], objects: Path) -> Iterator[Path]:
    """Manifests of the hidden states that `job` reads, its own before those taken over, each job's newest of a unit first."""
    extract = next((stage for stage in job["stages"] if stage["name"] == "extract"), {})
    for whose in dict.fromkeys([job["id"], *(extract.get("reused_from") or [])]):
        for unit in sorted(objects.glob(f"*/extract/{whose}/*")):
            yield from sorted(unit.glob("*-manifest.json"), reverse=True)
