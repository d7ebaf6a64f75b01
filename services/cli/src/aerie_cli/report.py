"""Jobs and their figures as tables for a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from aerie_cli.output import people, plain
from eagle3_core.evaluate.gate import thresholds
from eagle3_core.jobs.spec import Gate

WIDE = 72
"""Columns from which on a list of jobs has room for everything."""
COLOURS = {
    "succeeded": "green", "running": "cyan", "queued": "yellow", "pending": "dim", "failed": "red", "cancelled": "magenta",
    "cancelling": "magenta", "pass": "green", "fail": "red",
}  # fmt: skip


def duration(seconds: float | None) -> str:
    """`seconds` as 4.2 s, 3:05 or 2:03:04; nothing for None."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def clock(at: float) -> str:
    """The time of day of `at`, seconds since the epoch; with its date unless that is today's."""
    try:
        moment = time.localtime(at)
        return time.strftime("%H:%M:%S" if moment[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M:%S", moment)
    except (OverflowError, ValueError, OSError):  # a worker's clock may say anything
        return "--:--:--"


def coloured(word: str) -> str:
    """A status in its colour."""
    return f"[{COLOURS.get(word, 'white')}]{escape(word)}[/]"


def from_earlier_jobs(stage: dict[str, Any], job_id: str) -> bool:
    """Whether units of a stage came from other jobs, and not from an earlier stage of this one that made them on its way."""
    return bool(stage.get("reused_units")) and stage.get("reused_from") != [job_id]


def reuse_note(stage: dict[str, Any], job_id: str) -> str:
    """What of a stage did not have to run."""
    if not stage.get("reused_units"):
        return ""
    whence = "reused" if from_earlier_jobs(stage, job_id) else "kept from generate"
    total = (stage.get("shards") or {}).get("total", "?")
    return whence if stage.get("reused") else f"{stage['reused_units']} of {total} units {whence}"


def stages_table(job: dict[str, Any], width: int = WIDE) -> Table:
    """One row a stage; on a narrow terminal without units and notes."""
    table = Table(box=None, pad_edge=False)
    names = ("stage", "state", "done", "units", "time", "") if width >= WIDE else ("stage", "state", "done", "time")
    for name in names:
        table.add_column(name, justify="right" if name in ("done", "units", "time") else "left", no_wrap=bool(name))
    for stage in job["stages"]:
        shards = stage.get("shards") or {}
        note = reuse_note(stage, job["id"]) or stage.get("note") or ""
        if reason := stage.get("reason"):
            note = f"{reason.get('code')}: {reason.get('detail')}"
        cells = {
            "stage": stage["name"], "state": coloured(stage["state"]), "done": f"{stage['progress_percentage']:.0f} %",
            "units": f"{shards['done']}/{shards['total']}" if shards else "", "time": duration(stage.get("seconds")),
            "": escape(note),
        }  # fmt: skip
        table.add_row(*(cells[name] for name in names))
    return table


def figures_table(job: dict[str, Any]) -> RenderableType:
    """Acceptance length by task, and what stands beside it."""
    length = job["acceptance_length"]
    head = Text("acceptance length: tokens per verify call", style="bold")
    served: dict[str, Any] | None = job.get("acceptance_length_served")
    tasks_served: dict[str, Any] = served["by_task"] if served else {}
    table = Table(box=None, pad_edge=False)
    for name in ("task", "promised" if served else "mean", *(["served"] if served else []), "95 % interval", "prompts"):
        table.add_column(name, justify="left" if name == "task" else "right", no_wrap=name == "95 % interval")
    for task, row in length["by_task"].items():
        beside = [_number((tasks_served.get(task) or {}).get("mean"))] if served else []
        table.add_row(escape(task), _number(row["mean"]), *beside, _interval(row), str(row["prompts"]))
    table.add_section()
    table.add_row(
        "[bold]all[/]", f"[bold]{_number(length['mean'])}[/]", *([f"[bold]{_number(served['mean'])}[/]"] if served else []),
        _interval(length), str(job.get("prompts") or ""),
    )  # fmt: skip
    positions = ", ".join(_number(p) for p in job.get("acceptance_by_position") or [] if p is not None)
    lines = [
        f"mean over tasks {_number(length.get('macro'))}; accepted at position 1, 2, ...: {positions}",
        f"lossless {'on every prompt' if job.get('lossless') else 'NOT on every prompt'}, near-ties "
        f"{_share(job.get('near_tie_share'))}; looping answers "
        f"{_share(job.get('looping_share'))}; held-out 8-grams seen in training {_share(job.get('seen_ngram_share'))}",
    ]
    if speed := job.get("predicted_speedup"):
        lines.append(
            f"speed-up predicted (not measured) from costs on this {speed['device']}: {speed['factor']:.2f}x; a verify call "
            f"takes {speed['verify_chain_ms']:.0f} ms, one token {speed['verify_1_ms']:.0f} ms, a draft {speed['draft_ms']:.0f} ms"
        )
    lines += serving_lines(job)
    verdict = Text.from_markup(f"verdict {coloured(str(job.get('verdict')))}: {escape(_asked(job))}")
    why = [Text(f"  {reason}") for reason in job.get("reasons") or []]
    return Group(head, table, *map(Text, lines), verdict, *why)


def _asked(job: dict[str, Any]) -> str:
    """What the job's gate asked for."""
    try:
        return f"the gate asks for {thresholds(Gate.model_validate(job['spec']['evaluation']['gate']))}"
    except (KeyError, TypeError, ValueError):  # of an API of another version
        return "the gate's thresholds are not known here"


def serving_lines(job: dict[str, Any]) -> list[str]:
    """What the engine that serves made of the drafter; nothing where none was asked."""
    if not (serving := job.get("serving")):
        return []
    prompts = job.get("prompts") or 0
    lines = [
        f"served by {serving['engine']} in {serving['dtype']}: the promised verify calls on "
        f"{prompts - serving['prompts_counted_otherwise']} of {prompts} prompts; answers "
        f"{'as' if serving['lossless'] else 'OTHER than'} without the drafter"
    ]
    if times := serving.get("speedup"):
        where = "this CPU (no figure for GPUs)" if serving["device"] == "cpu" else serving["device"]
        each = ", ".join(
            f"{at['factor']:.2f}x with {at['in_flight']} in flight ({at['plain_tokens_per_s']:.0f} to "
            f"{at['drafted_tokens_per_s']:.0f} tokens/s)"
            for at in times
        )
        lines.append(f"speed-up measured in serving on {where}: {each}")
    return lines


def job_view(job: dict[str, Any], width: int = WIDE) -> RenderableType:
    """A job: head, stages, figures, why it waits or failed; for a terminal of `width` columns."""
    job = plain(job)
    parts: list[RenderableType] = [
        Text.from_markup(f"[bold]{escape(job['name'])}[/]  {job['id']}  {coloured(job['status'])}")
    ]
    if job.get("why_queued"):
        parts.append(Text(f"waits: {job['why_queued']}"))
    parts += [Text(f"warning: {warning}", style="yellow") for warning in job.get("warnings") or []]
    parts.append(stages_table(job, width))
    parts += why_ended(job)
    if job.get("acceptance_length"):
        parts.append(figures_table(job))
    return Group(*parts)


def show_job(job: dict[str, Any]) -> None:
    """Print a job for people."""
    console = people()
    console.print(job_view(job, console.width))


def jobs_table(jobs: Iterable[dict[str, Any]], width: int = WIDE) -> Table:
    """One row a job. On a terminal of less than 72 columns only what the next command needs, so that ids stay whole."""
    table = Table(box=None, pad_edge=False)
    names = ("id", "name", "status", "stage", "AL", "verdict") if width >= WIDE else ("id", "status")
    for name in names:
        table.add_column(name, no_wrap=name == "id")
    for job in plain(list(jobs)):
        length = job.get("acceptance_length") or {}
        cells = {
            "id": job["id"], "name": escape(job["name"]), "status": coloured(job["status"]), "stage": job.get("stage") or "",
            "AL": _number(length.get("mean")), "verdict": coloured(job["verdict"]) if job.get("verdict") else "",
        }  # fmt: skip
        table.add_row(*(cells[name] for name in names))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.1f} %"


def _interval(row: dict[str, Any]) -> str:
    return f"[{_number(row['ci_low'])}, {_number(row['ci_high'])}]".replace("[", r"\[")


def why_ended(job: dict[str, Any]) -> list[Text]:
    """What `job` failed for, and what to do; nothing where it did not."""
    if not (reason := plain(job.get("reason"))):
        return []
    remedy = [Text(f"  remedy: {reason['remedy']}")] if reason.get("remedy") else []
    return [Text(f"{reason.get('code')}: {reason.get('detail')}", style="red"), *remedy]
