"""Several processes that train one drafter, over gloo on the CPU: the same curve, and all of them end together."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.drafter.model import TENSORS_FILE
from eagle3_core.jobs.refusals import Preempted
from eagle3_core.jobs.wire import Metric
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.train import new_drafter, train_at, train_together
from eagle3_core.testing import RecordingReporter
from eagle3_core.train.launch import RankLost, pid_of
from eagle3_core.train.ranks import Ranks
from eagle3_core.train.testing import RandomStates

MASKS = ["0001111", "00111111", "00011111", "001111", "0011111111", "00111", "0000111", "01111"] * 3
SETTINGS: dict[str, Any] = {"epochs": 3, "accumulation": 3, "batch_tokens": 24, "noise_std": 0.05, "lr": 3e-3}
TOLERANCE = 2e-5
"""Largest relative difference of a loss to the one of a single process: floats are added in another order."""

pytestmark = pytest.mark.slow


def alone(states: RandomStates) -> tuple[dict[str, Any], Path, RecordingReporter]:
    ctx = states.context("train")
    assert isinstance(ctx.reporter, RecordingReporter)
    return train_at(ctx, torch.device("cpu"), Ranks(), new_drafter(ctx)), ctx.scratch, ctx.reporter


def ranks_of(ctx: StageContext) -> Path:
    """Where the ranks of an attempt work; as fresh as a unit's scratch folder is."""
    return ctx.scratch / f"ranks-{id(ctx)}"


def together(ctx: StageContext, ranks: int) -> tuple[dict[str, Any], Path, RecordingReporter]:
    assert isinstance(ctx.reporter, RecordingReporter)
    folder = ranks_of(ctx)
    return train_together(ctx, folder, ranks, "cpu"), folder, ctx.reporter


def curve(reporter: RecordingReporter, name: str = "loss") -> dict[int, float]:
    return {m.step: m.value for m in reporter.metrics if m.name == name}


def assert_same_course(one: RecordingReporter, other: RecordingReporter) -> None:
    for name in ("loss", "val_loss", "grad_norm"):
        assert curve(one, name)
        assert curve(other, name) == pytest.approx(curve(one, name), rel=TOLERANCE), name


@pytest.mark.parametrize(("ranks", "sharding"), [(3, "ddp"), (2, "fsdp2")])
def test_ranks_together_train_what_one_would(tmp_path: Path, ranks: int, sharding: str) -> None:
    expected, folder, quiet = alone(RandomStates(tmp_path / "alone", MASKS, **SETTINGS))
    states = RandomStates(tmp_path / "together", MASKS, sharding=sharding, **SETTINGS)

    result, shared, loud = together(states.context("train"), ranks)

    assert result["ranks"] == ranks
    assert_same_course(quiet, loud)
    assert result["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
    trained, reference = load_file(shared / "drafter" / TENSORS_FILE), load_file(folder / "drafter" / TENSORS_FILE)
    for name, weight in reference.items():
        assert torch.allclose(trained[name], weight, atol=2e-4), name


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_a_step_with_fewer_samples_than_ranks_hangs_nobody(tmp_path: Path, sharding: str) -> None:
    masks, settings = ["00111", "0011111"] * 2, {"epochs": 2, "batch_tokens": 8, "lr": 3e-3}
    _, _, quiet = alone(RandomStates(tmp_path / "alone", masks, **settings))
    states = RandomStates(tmp_path / "together", masks, sharding=sharding, **settings)

    _, _, loud = together(states.context("train"), 3)

    assert curve(loud) == pytest.approx(curve(quiet), rel=TOLERANCE)


class Watching:
    """A reporter that acts when a step is done."""

    def __init__(self, ctx: StageContext, step: int, act: Any) -> None:
        assert isinstance(ctx.reporter, RecordingReporter)
        self._tell, self._step, self._act = ctx.reporter.metric, step, act
        self._done = threading.Event()
        ctx.reporter.metric = self._metric  # type: ignore[method-assign]

    def _metric(self, metric: Metric) -> None:
        self._tell(metric)
        if metric.step >= self._step and not self._done.is_set():
            self._done.set()
            self._act()


LONG = {**SETTINGS, "epochs": 200, "checkpoint_every_steps": 5}


@pytest.mark.parametrize(("sharding", "fewer"), [("ddp", 1), ("fsdp2", 2)])
def test_a_stop_saves_and_fewer_ranks_go_on_along_the_same_curve(tmp_path: Path, sharding: str, fewer: int) -> None:
    settings = {**SETTINGS, "epochs": 12, "sharding": sharding}
    _, _, quiet = alone(RandomStates(tmp_path / "alone", MASKS, **settings))
    states = RandomStates(tmp_path / "together", MASKS, **settings)
    ctx = states.context("train")
    Watching(ctx, 4, ctx.stop.set)

    with pytest.raises(Preempted):
        together(ctx, 3)
    again = states.context("train")
    _, _, second = alone(states) if fewer == 1 else together(again, fewer)

    assert isinstance(ctx.reporter, RecordingReporter)
    assert any("going on from the checkpoint" in line.text for line in second.lines)
    joined = curve(ctx.reporter) | curve(second)
    assert joined == pytest.approx(curve(quiet), rel=1e-3)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sigterm_to_any_rank_ends_all_with_a_checkpoint(tmp_path: Path, rank: int) -> None:
    states = RandomStates(tmp_path, MASKS, **LONG)
    ctx = states.context("train")
    folder = ranks_of(ctx)
    Watching(ctx, 2, lambda: os.kill(int(pid_of(folder, rank).read_text()), signal.SIGTERM))

    with pytest.raises(Preempted):
        together(ctx, 2)

    assert isinstance(ctx.reporter, RecordingReporter)
    assert any("checkpoint at step" in line.text for line in ctx.reporter.lines)


def test_a_rank_that_is_killed_is_named_and_the_next_attempt_goes_on(tmp_path: Path) -> None:
    states = RandomStates(tmp_path, MASKS, **{**SETTINGS, "epochs": 12, "checkpoint_every_steps": 2})
    ctx = states.context("train")
    folder = ranks_of(ctx)
    Watching(ctx, 5, lambda: os.kill(int(pid_of(folder, 1).read_text()), signal.SIGKILL))

    with pytest.raises(RankLost, match="rank 1 of 2"):
        together(ctx, 2)
    result, _, second = together(states.context("train"), 2)

    assert any("going on from the checkpoint" in line.text for line in second.lines)
    assert result["steps"] == max(curve(second))
