"""The step's measurements run in their least shape, and their rows say what they are."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def measured(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-m", *arguments], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])["rows"]


def test_ours_stands_beside_speculators_with_the_same_gradients() -> None:
    rows = measured("eagle3_core.bench.train", "--device", "cpu", "--cases", "T96", "--densities", "70,30")

    assert {row["density"] for row in rows} == {70, 30}
    assert [row["impl"] for row in rows[:3]] == ["aerie", "speculators (eager)", "speculators (sdpa)"]
    for row in rows:
        assert row["ms"] > 0
        assert row["tokens_per_s"] == pytest.approx(96 / row["ms"] * 1000)
        assert row["ratio"] > 0
        if row["impl"] == "aerie":
            assert row["max_grad_error"] < 1e-4


def test_muons_step_stands_beside_that_of_adamw() -> None:
    rows = measured(
        "eagle3_core.bench.train", "--device", "cpu", "--cases", "T96", "--densities", "70", "--optimizer", "muon"
    )

    assert [row["impl"] for row in rows] == ["aerie (trained head, muon)", "aerie (trained head, adamw)"]
    assert rows[0]["ratio"] == pytest.approx(rows[1]["ms"] / rows[0]["ms"])


def test_rows_are_told_as_they_are_measured_so_that_a_run_cut_short_keeps_them() -> None:
    begun = [
        sys.executable,
        "-m",
        "eagle3_core.bench.train",
        "--device",
        "cpu",
        "--cases",
        "T96",
        "--densities",
        "70,70,70",
    ]
    with subprocess.Popen(begun, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        first = next(line for line in running.stderr if line.startswith("{"))
        running.kill()

    assert json.loads(first)["impl"] == "aerie"


def test_two_ranks_are_measured_against_one() -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    rows = measured(
        *torchrun, "-m", "eagle3_core.bench.scaling", "--device", "cpu", "--cases", "T96", "--densities", "70"
    )

    assert [(row["impl"], row["scaling"]) for row in rows] == [
        ("aerie, one GPU", "weak"), ("aerie, ddp", "weak"), ("aerie, ddp", "strong"), ("aerie, fsdp2", "weak"),
        ("aerie, fsdp2", "strong"),
    ]  # fmt: skip
    assert rows[0]["ratio"] == pytest.approx(1.0)
    assert all(row["ratio"] > 0 and row["imbalance"] >= 0 and 0 <= row["communication"] <= 1 for row in rows)
