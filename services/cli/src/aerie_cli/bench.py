"""`aerie bench`: what this machine does, measured beside what others do on it.

Measuring needs torch and the peers' packages, which this command does not load: it starts the core's own measuring
module in a process of its own, shows what that says on the way, and prints the rows it ends with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from aerie_cli.output import Json, aside, command, document, people
from eagle3_core.bench.record import write_record
from eagle3_core.errors import AerieError, InvalidRequest

bench = typer.Typer(no_args_is_help=True, help="Measure this machine, beside what others reach on it.")


class BenchFailed(AerieError):
    """The measuring process ended without rows."""

    code, status = "bench.failed", 500


Device = Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Default: a GPU where there is one.")]
Gpus = Annotated[int | None, typer.Option(min=2, help="GPUs that share a step: measures scaling instead of peers.")]
Cases = Annotated[str | None, typer.Option(help="Shapes, with commas: S2048, S8192, S32768, K4096, C1024.")]
Densities = Annotated[str, typer.Option(help="Percent of supervised tokens, with commas.")]


@bench.callback()
def _group() -> None:
    """Keep `train` a command of its own, though it is the only one yet."""


@bench.command("train")
@command
def train(
    device: Device = None, gpus: Gpus = None, cases: Cases = None, densities: Densities = "70,30", as_json: Json = False
) -> int:
    """One training step: ours and, where installed, the peers', on the same inputs in one run."""
    if gpus is not None and device == "cpu":
        raise InvalidRequest("--gpus shares a step over GPUs, and --device is cpu", remedy="leave one of them out")
    measured = _measured(_command(device, gpus, cases, densities))
    _publish("train" if gpus is None else "scaling", measured)
    if as_json:
        document(measured)
        return 0
    people().print(_table(measured))
    return 0


def _command(device: str | None, gpus: int | None, cases: str | None, densities: str) -> list[str]:
    options = [
        *(["--device", device] if device else []),
        *(["--cases", cases] if cases else []),
        "--densities",
        densities,
    ]
    if gpus is None:
        return [sys.executable, "-m", "eagle3_core.bench.train", *options]
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        str(gpus),
    ]
    return [sys.executable, *torchrun, "-m", "eagle3_core.bench.scaling", *options]


def _measured(arguments: list[str]) -> dict[str, Any]:
    """The document that the measuring process writes last. Raises BenchFailed."""
    aside().print("measuring; this takes minutes", style="dim")
    done = subprocess.run(arguments, stdout=subprocess.PIPE, env=os.environ, check=False)  # noqa: S603
    lines = done.stdout.decode().strip().splitlines()
    if done.returncode != 0 or not lines:
        raise BenchFailed(
            f"the measuring process ended with exit status {done.returncode}",
            remedy="its own words are above; --cases and --densities ask for less at once",
        )
    return json.loads(lines[-1])


def _publish(name: str, measured: dict[str, Any]) -> None:
    """Record the rows, also under the names that every benchmark uses."""
    rows = [
        {
            "name": f"{row['impl']}, {row['case']}, {row['density']} % supervised", "value": row["tokens_per_s"],
            "unit": "tokens/s", "reference": row["tokens_per_s"] / row["ratio"] if row["ratio"] else None, **row,
        }
        for row in measured["rows"]
    ]  # fmt: skip
    write_record(name, measured["machine"], rows)


def _table(measured: dict[str, Any]) -> Table:
    rows: list[dict[str, Any]] = measured["rows"]
    table = Table(title=measured["machine"], box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("impl", "case", "scaling") else "right")
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    return table


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "max_grad_error":
        return f"{value:.1e}"
    if name in ("communication", "imbalance"):
        return f"{value:.1%}"
    if name == "ratio":
        return f"{value:.2f}x"
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
