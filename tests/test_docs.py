"""The documentation says what the code does."""

from pathlib import Path

from eagle3_core.jobs.docs import render

ROOT = Path(__file__).parents[1]


def test_the_job_reference_is_the_job_model():
    assert (ROOT / "docs/job.md").read_text() == render(), (
        "run: .venv/bin/python -m eagle3_core.jobs.docs > docs/job.md"
    )
