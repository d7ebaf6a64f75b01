"""What every benchmark shares: rows with a reference beside them, one record and one table per benchmark.

A benchmark is a script that calls `benchmark(measure)`. `--small` asks it for the least shape that still runs every line:
the figures mean nothing then, but a test runs it so, and a benchmark cannot rot.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle3_core.bench.record import FOLDER, write_record

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """One figure, and the same figure of the reference that ran beside it."""

    name: str
    value: float
    unit: str
    reference: float
    """What the reference reached in the same run; which one, the benchmark's own docstring says."""
    target: float | None = None
    """The most that `value` should be on a machine that does nothing else; None: nothing was set."""

    @property
    def ratio(self) -> float:
        """How many times the reference."""
        return self.value / self.reference

    @property
    def met(self) -> bool | None:
        """Whether `value` is within the target."""
        return None if self.target is None else self.value <= self.target

    def record(self) -> dict[str, Any]:
        """The row as the JSON file has it; `target` and `met` only where one is set."""
        said = {**asdict(self), "ratio": self.ratio, "met": self.met}
        return said if self.target is not None else {k: v for k, v in said.items() if k not in ("target", "met")}


def rate(work: Callable[[], float], rounds: int) -> float:
    """The best rate of `rounds` runs of `work`, which says how much it did; per second."""
    best = 0.0
    for _ in range(rounds):
        started = time.perf_counter()
        done = work()
        best = max(best, done / (time.perf_counter() - started))
    return best


def real_verifier() -> Path:
    """The converted SmolLM2 folder."""
    script = [sys.executable, str(ROOT / "examples/smollm2/verifier.py")]
    return Path(subprocess.run(script, check=True, capture_output=True, text=True).stdout.splitlines()[-1].strip())


def command_line(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--small", action="store_true", help="the least shape: shows that it runs, measures nothing")
    options.add_argument("--out", type=Path, default=FOLDER, help=f"folder of the JSON file (default: {FOLDER})")
    return options


def benchmark(measure: Callable[[bool], list[Row]]) -> None:
    """The main program of a benchmark: `measure(small)` makes its rows, which are published under the script's name."""
    options = command_line("Measures beside a reference, prints a table, writes a JSON file.").parse_args()
    publish(Path(sys.argv[0]).stem, measure(options.small), options.out)


def publish(name: str, rows: list[Row], folder: Path) -> None:
    """Write `NAME.json` into `folder` and print the table."""
    machine = _machine()
    write_record(name, machine, [row.record() for row in rows], folder)
    targets = any(row.target is not None for row in rows)
    table = Table(title=f"{name} ({machine})")
    for column in ("what", "value", "unit", "reference", "ratio", *(("target",) if targets else ())):
        right = column in ("value", "reference", "ratio")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        goal = [] if row.target is None else [f"{'met' if row.met else 'MISSED'} (<= {row.target:.0f})"]
        table.add_row(row.name, f"{row.value:.1f}", row.unit, f"{row.reference:.1f}", f"{row.ratio:.2f}x", *goal)
    Console().print(table)


def _machine() -> str:
    """Processor and threads; torch's, where the benchmark uses it. It is not imported for this: it weighs 400 MiB."""
    processor, torch = platform.processor() or platform.machine(), sys.modules.get("torch")
    if torch is None:
        return f"{processor}, {os.cpu_count()} threads"
    return f"{processor}, {torch.get_num_threads()} threads, torch {torch.__version__}"
