"""What every benchmark shares: rows with a reference beside them, one JSON file and one table per benchmark."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
FOLDER = Path(".aerie/bench")


@dataclass(frozen=True)
class Row:
    """One figure, and the same figure of the reference that ran beside it."""

    name: str
    value: float
    unit: str
    reference: float
    """What the reference reached in the same run; which one, the benchmark's own docstring says."""

    @property
    def ratio(self) -> float:
        """How many times the reference."""
        return self.value / self.reference


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


def publish(name: str, rows: list[Row]) -> None:
    """Write `.aerie/bench/NAME.json` and print the table."""
    machine = (
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    FOLDER.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine, "rows": [{**asdict(row), "ratio": row.ratio} for row in rows]}
    (FOLDER / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    table = Table(title=f"{name} ({machine})")
    for column in ("what", "value", "unit", "reference", "ratio"):
        table.add_column(column, justify="left" if column in ("what", "unit") else "right")
    for row in rows:
        table.add_row(row.name, f"{row.value:.1f}", row.unit, f"{row.reference:.1f}", f"{row.ratio:.2f}x")
    Console().print(table)
