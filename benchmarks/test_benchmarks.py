"""Every benchmark runs, in its least shape, and writes rows that can be read without knowing it."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from trainer_parity import paired

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
