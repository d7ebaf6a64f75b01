"""Where the time of a run went, so that a person sees whether the accelerator was kept busy.

`compute` is the time of the steps themselves (on a GPU between events on its own stream, so queueing ahead neither
hides nor adds anything); `waiting` is the time in which the loop had no batch to train on; `validating` and `saving`
speak for themselves. The rest of the wall clock is the loop's own.

The rate of the bare step is that of the steps behind the first ten of an attempt: those compile kernels where the machine
has none of this shape yet, and what they took longer is told as `starting`. `compute_share` is the stage's rate beside the
bare step's, everything that the stage did besides counted against it.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

import torch

Part = Literal["compute", "waiting", "validating", "saving"]
FIRST_STEPS = 10
"""Steps that may compile kernels."""


class Speed:
    """Adds up the parts of one attempt; what an earlier attempt did is not in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = time.perf_counter()
        self._spent: dict[Part, float] = {"compute": 0.0, "waiting": 0.0, "validating": 0.0, "saving": 0.0}
        self._events: list[tuple[bool, torch.cuda.Event, torch.cuda.Event]] = []
        self._first_s = 0.0
        self._first_tokens = 0
        self.tokens = 0
        """Tokens of all samples trained on, over all ranks."""
        self.supervised = 0
        """Tokens among them that chains draft first."""
        self.steps = 0

    def start(self) -> None:
        """The clock starts here: reading masks and building the drafter are not the loop's."""
        self._began = time.perf_counter()

    @contextmanager
    def spend(self, part: Part) -> Generator[None]:
        """Count the time of a block for `part`, by the host's clock."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent[part] += time.perf_counter() - began

    @contextmanager
    def computing(self) -> Generator[None]:
        """Count the time of a block as `compute`, by the device's clock."""
        if self._device.type == "cpu":
            before = self._spent["compute"]
            with self.spend("compute"):
                yield
            self._note_first(self._starting, self._spent["compute"] - before)
            return
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        yield
        ended.record()
        self._events.append((self._starting, began, ended))

    def waited(self, seconds: float) -> None:
        """Add time in which there was no batch."""
        self._spent["waiting"] += seconds

    def count(self, tokens: int, supervised: int) -> None:
        """One more step, over so many tokens."""
        if self._starting:
            self._first_tokens += tokens
        self.steps, self.tokens, self.supervised = self.steps + 1, self.tokens + tokens, self.supervised + supervised

    @property
    def _starting(self) -> bool:
        return self.steps < FIRST_STEPS

    def _note_first(self, starting: bool, seconds: float) -> None:
        self._first_s += seconds if starting else 0.0

    def _bare_tokens_per_s(self) -> float:
        """Of the steps behind the first ones; of all where there are too few of them to tell."""
        tokens, seconds = self.tokens, self._spent["compute"]
        if self.steps >= 2 * FIRST_STEPS:
            tokens, seconds = tokens - self._first_tokens, seconds - self._first_s
        return tokens / seconds if seconds else 0.0

    def report(self) -> dict[str, float]:
        """Seconds and rates so far; on a GPU it waits for the steps that are still running."""
        for starting, began, ended in self._events:
            ended.synchronize()
            seconds = began.elapsed_time(ended) / 1000
            self._spent["compute"] += seconds
            self._note_first(starting, seconds)
        self._events.clear()
        wall = time.perf_counter() - self._began
        bare = self._bare_tokens_per_s()
        alone_s = self.tokens / bare if bare else 0.0
        return {
            "wall_s": wall,
            **{f"{part}_s": seconds for part, seconds in self._spent.items()},
            "steps": self.steps,
            "tokens_per_s": self.tokens / wall if wall else 0.0,
            "supervised_tokens_per_s": self.supervised / wall if wall else 0.0,
            "starting_s": max(0.0, self._spent["compute"] - alone_s),
            "bare_step_tokens_per_s": bare,
            "compute_share": alone_s / wall if wall else 0.0,
            "waiting_share": self._spent["waiting"] / wall if wall else 0.0,
        }


def sentence(report: dict[str, float]) -> str:
    """`report` as a person reads it."""
    if not report["steps"]:
        return "nothing was left to train"
    return (
        f"{report['steps']:.0f} steps in {report['wall_s']:.1f} s: {report['tokens_per_s']:.0f} tokens/s, "
        f"{report['compute_share']:.1%} of the bare step's {report['bare_step_tokens_per_s']:.0f}; waiting for data "
        f"{report['waiting_share']:.1%}, first steps {report['starting_s']:.1f} s longer, "
        f"validating {report['validating_s']:.1f} s, saving {report['saving_s']:.1f} s"
    )
