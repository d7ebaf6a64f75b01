"""Where a run's time went: the bare step is measured behind the steps that compile, and all else counts against the stage."""

from __future__ import annotations

import time

import pytest
import torch

from eagle3_core.train.speed import FIRST_STEPS, Speed, sentence


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on only when it is told to."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


def told(clock, steps: int, first: float, later: float, validating: float) -> dict[str, float]:
    """The report on steps of 100 tokens, the first of which take longer."""
    speed = Speed(torch.device("cpu"))
    for step in range(steps):
        with speed.computing():
            clock(first if step < FIRST_STEPS else later)
        speed.count(100, 50)
    with speed.spend("validating"):
        clock(validating)
    return speed.report()


def test_what_the_first_steps_took_longer_is_no_part_of_the_bare_step(clock):
    report = told(clock, steps=100, first=3.0, later=1.0, validating=10.0)
    assert report["bare_step_tokens_per_s"] == pytest.approx(100)
    assert report["starting_s"] == pytest.approx(2.0 * FIRST_STEPS)
    assert report["wall_s"] == pytest.approx(130)
    assert report["compute_share"] == pytest.approx(100 / 130)
    assert "first steps 20.0 s longer" in sentence(report)


def test_a_short_run_is_measured_as_a_whole(clock):
    report = told(clock, steps=FIRST_STEPS, first=2.0, later=1.0, validating=0.0)
    assert report["bare_step_tokens_per_s"] == pytest.approx(50)
    assert report["starting_s"] == 0
    assert report["compute_share"] == pytest.approx(1)
