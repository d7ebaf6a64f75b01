"""`aerie bench train` measures in another process and shows its rows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aerie_cli.main import app

ROW: dict[str, Any] = {
    "impl": "aerie", "case": "C1024", "density": 30, "ms": 812.5, "tokens_per_s": 1260.3, "peak_gib": None, "ratio": 2.31,
    "max_grad_error": 3e-6,
}  # fmt: skip


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that were run; each ends with one document of one row."""
    lines: list[list[str]] = []

    def run(arguments: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        lines.append(arguments)
        document = json.dumps({"machine": "x86_64, 2 threads", "rows": [ROW]})
        return subprocess.CompletedProcess(arguments, 0, f"noise\n{document}\n".encode())

    monkeypatch.setattr("aerie_cli.bench.subprocess.run", run)
    return lines


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_rows_are_shown_as_a_table_and_as_one_document(measured: list[list[str]]) -> None:
    shown = CliRunner().invoke(app, ["bench", "train", "--device", "cpu", "--cases", "C1024"])
    printed = CliRunner().invoke(app, ["bench", "train", "--json"])

    assert shown.exit_code == printed.exit_code == 0
    assert "2.31x" in shown.stdout
    assert "3.0e-06" in shown.stdout
    assert json.loads(printed.stdout)["rows"] == [ROW]
    (kept,) = json.loads(Path(".aerie/bench/train.json").read_text())["rows"]
    assert kept.items() >= {**ROW, "value": 1260.3, "unit": "tokens/s", "reference": 1260.3 / 2.31}.items()
    assert measured[0][1:] == [
        "-m", "eagle3_core.bench.train", "--device", "cpu", "--cases", "C1024", "--densities", "70,30"
    ]  # fmt: skip


def test_several_gpus_are_measured_under_torchrun(measured: list[list[str]]) -> None:
    CliRunner().invoke(app, ["bench", "train", "--gpus", "2"])

    assert "torch.distributed.run" in measured[0]
    assert measured[0][measured[0].index("--nproc-per-node") + 1] == "2"
    assert "eagle3_core.bench.scaling" in measured[0]


def test_gpus_on_a_cpu_are_refused(measured: list[list[str]]) -> None:
    refused = CliRunner().invoke(app, ["bench", "train", "--gpus", "2", "--device", "cpu"])

    assert refused.exit_code == 2
    assert measured == []
