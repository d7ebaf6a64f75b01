"""Every benchmark runs, in its least shape, and writes rows that can be read without knowing it."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

NO_BENCHMARKS = ("rows", "held", "exactness")
"""What they share, and a proof for GPUs that takes minutes on a CPU; its parts are tested in test_drafter_jumps.py."""
BENCHMARKS = sorted(
    path
    for path in Path(__file__).parent.glob("*.py")
    if path.stem not in NO_BENCHMARKS and not path.stem.startswith("test_")
)


@pytest.mark.slow
@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_writes_rows_with_their_reference_and_ratio(script, tmp_path):
    subprocess.run([sys.executable, script, "--small", "--out", tmp_path], check=True, cwd=tmp_path)

    rows = json.loads((tmp_path / f"{script.stem}.json").read_text())["rows"]
    assert rows
    for row in rows:
        assert set(row) == {"name", "value", "unit", "reference", "ratio"}
        assert row["name"]
        assert row["unit"]
        assert math.isfinite(row["value"])
        assert row["value"] > 0 or (row["value"] == 0 and row["unit"] == "losses")  # none is the best there is
        assert math.isfinite(row["reference"])
        assert row["reference"] > 0
        assert row["ratio"] == pytest.approx(row["value"] / row["reference"])
