"""Every benchmark runs, in its least shape, and writes rows that can be read without knowing it."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rows import Row, publish
from trainer_parity import paired

NO_BENCHMARKS = ("rows", "held", "served", "asking", "exactness")
"""What they share or start, and a proof for GPUs that takes minutes on a CPU; its parts are tested in test_drafter_jumps.py."""
BENCHMARKS = sorted(
    path
    for path in Path(__file__).parent.glob("*.py")
    if path.stem not in NO_BENCHMARKS and not path.stem.startswith("test_")
)

TARGETS = {
    "service": {"get_p95_ms": 50, "get_304_p95_ms": 10, "queue_to_start_p95_ms": 1000, "fleet_lease_losses": 0},
}
"""What rows are compared with, by benchmark; whether they meet it is only told."""


@pytest.mark.slow
@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_writes_rows_with_their_reference_and_ratio(script, tmp_path):
    subprocess.run([sys.executable, script, "--small", "--out", tmp_path], check=True, cwd=tmp_path)

    rows = json.loads((tmp_path / f"{script.stem}.json").read_text())["rows"]
    assert rows
    for row in rows:
        goal = {"target", "met"} & set(row)
        assert set(row) == {"name", "value", "unit", "reference", "ratio"} | goal
        assert len(goal) in (0, 2)
        assert not goal or row["met"] == (row["value"] <= row["target"])
        assert row["name"]
        assert row["unit"]
        assert math.isfinite(row["value"])
        assert row["value"] > 0 or (row["value"] == 0 and row["unit"] == "losses")  # none is the best there is
        assert math.isfinite(row["reference"])
        assert row["reference"] > 0
        assert row["ratio"] == pytest.approx(row["value"] / row["reference"])
    assert {row["name"]: row["target"] for row in rows if "target" in row} == TARGETS.get(script.stem, {})


def test_a_row_says_its_target_and_whether_it_is_met(tmp_path, capsys):
    publish(
        "speed",
        [Row("fast", 9.0, "ms", 3.0, 10), Row("slow", 11.0, "ms", 3.0, 10), Row("free", 9.0, "ms", 3.0)],
        tmp_path,
    )

    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert [(row.get("target"), row.get("met")) for row in rows] == [(10, True), (10, False), (None, None)]
    told = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if " ms " in line}
    assert ["met" in told["fast"], "MISSED" in told["slow"], "<=" in told["free"]] == [True, True, False]


def test_the_process_that_the_service_benchmark_weighs_is_the_api_alone():
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import {{}}; print(*sorted(sys.modules))"
    served, alone = (
        set(
            subprocess.run(
                [sys.executable, "-c", code.format(what)], check=True, capture_output=True, text=True
            ).stdout.split()
        )
        for what in ("served", "aerie_api.server, aerie_api.settings")
    )

    assert served - alone == {"served"}


def look(*tokens):
    """What prompts came to that took 10 verify calls each."""
    return [SimpleNamespace(chain=SimpleNamespace(index=i, tokens=n, calls=10)) for i, n in enumerate(tokens)]


def test_a_difference_that_changes_sign_from_seed_to_seed_has_zero_inside_its_interval():
    even, more = look(*[20] * 50), look(*[21] * 50)

    once = paired([more], [even])
    noisy = paired([more, even, more], [even, more, even])
    steady = paired([more] * 3, [even] * 3)

    assert once == pytest.approx((2.1, 2.0, 0.1, 0.1))  # what prompts alone would say
    assert noisy[2] < 0 < noisy[3]
    assert steady == pytest.approx((2.1, 2.0, 0.1, 0.1))


def test_prompts_are_paired_whatever_their_order():
    ours, theirs = look(30, 10, 20), look(30, 10, 20)

    assert paired([ours[::-1]], [theirs])[2:] == pytest.approx((0.0, 0.0))
