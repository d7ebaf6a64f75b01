"""One training step, ours and the peers', on the same inputs in one run.

    python -m eagle3_core.bench.train --device cpu|cuda [--cases S2048,S8192] [--densities 70,30] [--optimizer muon]

writes one JSON document to stdout: `{"machine": ..., "rows": [...]}`; progress goes to stderr, and so does each row as soon
as it is measured: a run that is cut short keeps what it has. A row names its implementation, case and density (percent of
supervised tokens, in contiguous spans). `ratio` is ours over the fastest peer's of the same objective at the same mask, 1.0
for that peer itself; `max_grad_error` is the largest difference of a gradient to the peer's, relative to that gradient's
norm, where both can be compared.

`--optimizer muon` asks what Muon's step costs instead: ours with it beside ours with AdamW, on a CPU too.

Steps of all implementations of a case are timed in turns, so that a machine that gets slower is slower for all.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from eagle3_core.bench import specforge
from eagle3_core.bench.cases import CASES, ON_CPU, ON_CUDA, Case, Work, make
from eagle3_core.bench.implementations import Implementation, OptimizerName, Ours, Speculators
from eagle3_core.drafter.chains import LabelRule
from eagle3_core.drafter.losses import LossName

WARM_UP, TIMED = {"cpu": 1, "cuda": 4}, {"cpu": 3, "cuda": 12}
ROUNDS = 2
"""Turns on a GPU, each of `TIMED` steps back to back."""


@dataclass(frozen=True)
class Row:
    """One implementation at one shape and mask."""

    impl: str
    case: str
    density: int
    """Percent."""
    ms: float
    """Median of a step."""
    tokens_per_s: float
    """All tokens of the sample, supervised or not."""
    peak_gib: float | None
    """Most memory in use during a step, its inputs included, what stands beside it not; None on a CPU."""
    ratio: float | None
    """tokens_per_s over the fastest peer's."""
    max_grad_error: float | None


@dataclass(frozen=True)
class Duel:
    """Peers of one objective, and what of ours does the same."""

    label: str
    loss: LossName
    rule: LabelRule
    train_head: bool
    peers: tuple[Callable[[Work, torch.device], Implementation], ...]
    optimizer: OptimizerName | None = None
    """Of ours, if not that which fits the peers."""


def optimizers() -> list[Duel]:
    """Muon's step beside AdamW's, with the objective and the head that a job has unless it says otherwise."""

    def adamw(work: Work, device: torch.device) -> Implementation:
        return Ours(work, device, loss="soft_ce", rule="serving", label=" (trained head, adamw)", optimizer="adamw")

    return [Duel(" (trained head, muon)", "soft_ce", "serving", True, (adamw,), "muon")]


def duels(device: torch.device) -> list[Duel]:
    """What can be compared here."""
    if device.type == "cpu":
        kinds = tuple(_speculators(kind) for kind in ("eager", "sdpa"))
        return [Duel("", "kl", "speculators", False, kinds)]
    flex = (_speculators("simple_flex_attention"),)
    found = [Duel(" (frozen head)", "kl", "speculators", False, flex)]
    forges = tuple(_specforge(compact) for compact in (False, True)) if specforge.installed() else ()
    return [*found, Duel(" (trained head)", "soft_ce", "specforge", True, forges)]


def _speculators(kind: str) -> Callable[[Work, torch.device], Implementation]:
    def build(work: Work, device: torch.device) -> Implementation:
        if device.type == "cpu":
            return Speculators(work, device, kind)
        shipped = Speculators(work, device, kind)
        try:
            shipped.step()
        except Exception as error:
            _say(f"speculators' compiled forward fails here ({type(error).__name__}); its forward runs uncompiled")
            return Speculators(work, device, kind, compiled=False)
        return shipped

    return build


def _specforge(compact: bool) -> Callable[[Work, torch.device], Implementation]:
    return lambda work, device: specforge.SpecForge(work, device, compact=compact)


def measure(case: Case, density: int, duel: Duel, device: torch.device) -> list[Row]:
    """Ours and the peers of `duel`, the fastest first among them as reference."""
    work = make(case, density / 100, device, train_head=duel.train_head)
    how: dict[str, Any] = {"loss": duel.loss, "rule": duel.rule, "label": duel.label, "optimizer": duel.optimizer}
    ours, standing = _standing(lambda: Ours(work, device, **how), device)
    everyone, held = [ours], [standing + work.embedding_bytes]
    for build in duel.peers:
        _say(f"{case.name} {density} %: preparing a peer{duel.label}")
        peer, standing = _standing(partial(build, work, device), device)
        everyone, held = [*everyone, peer], [*held, standing]
    compares = device.type == "cpu" and duel.optimizer is None
    error = _gradient_error(ours, everyone[1:]) if compares else None
    times = _timed(everyone, device)
    peaks = [_peak(one, own + work.state_bytes, device) for one, own in zip(everyone, held, strict=True)]
    medians = [statistics.median(times[i]) for i in range(len(everyone))]
    best = min(medians[1:], default=None)
    return [
        Row(
            one.name, case.name, density, median * 1000, case.tokens / median, peak,
            best / median if best else None, error if one is ours else None,
        )
        for one, median, peak in zip(everyone, medians, peaks, strict=True)
    ]  # fmt: skip


def _timed(everyone: Sequence[Implementation], device: torch.device) -> list[list[float]]:
    """Seconds of each step of each implementation, taken in turns."""
    for one in everyone:
        for _ in range(WARM_UP[device.type]):
            one.step()
    times: list[list[float]] = [[] for _ in everyone]
    if device.type == "cpu":
        for _ in range(TIMED["cpu"]):
            for i, one in enumerate(everyone):
                began = time.perf_counter()
                one.step()
                times[i].append(time.perf_counter() - began)
        return times
    for _ in range(ROUNDS):
        for i, one in enumerate(everyone):  # back to back, as in a run: a GPU between two peers would be colder
            times[i] += _back_to_back(one)
    return times


def _back_to_back(one: Implementation) -> list[float]:
    """Seconds by the GPU's clock between the ends of consecutive steps, after one that is not counted."""
    one.step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED["cuda"] + 1)]
    marks[0].record()
    for mark in marks[1:]:
        one.step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]


def _standing(build: Callable[[], Implementation], device: torch.device) -> tuple[Implementation, int]:
    """What `build` makes, and the bytes that it holds between its steps (its optimizer's states are made by the first)."""
    if device.type == "cpu":
        return build(), 0
    before = torch.cuda.memory_allocated()
    one = build()
    one.step()
    torch.cuda.synchronize()
    gc.collect()
    return one, torch.cuda.memory_allocated() - before


def _peak(one: Implementation, held: int, device: torch.device) -> float | None:
    """GiB at most in use during a step of `one`, of which `held` bytes stand before it; what the others hold is left out."""
    if device.type == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one.step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before + held) / 2**30


def _gradient_error(ours: Implementation, peers: Sequence[Implementation]) -> float | None:
    """Largest relative difference of a gradient to the first peer's."""
    if not peers:
        return None
    ours.step()
    peers[0].step()
    reference, mine = peers[0].gradients(), ours.gradients()
    return max(float((mine[name] - reference[name]).norm() / reference[name].norm()) for name in mine)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def machine(device: torch.device) -> str:
    """Where this ran."""
    if device.type == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def main(arguments: Sequence[str]) -> int:
    """Measure, and write the document."""
    parser = argparse.ArgumentParser(prog="python -m eagle3_core.bench.train")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases")
    parser.add_argument("--densities", default="70,30")
    parser.add_argument("--optimizer", choices=("muon",))
    asked = parser.parse_args(arguments)
    device = torch.device(asked.device)
    names = asked.cases.split(",") if asked.cases else (ON_CPU if asked.device == "cpu" else ON_CUDA)
    rows: list[Row] = []
    for name in names:
        for density in map(int, asked.densities.split(",")):
            for duel in optimizers() if asked.optimizer else duels(device):
                measured = measure(CASES[name], density, duel, device)
                for row in measured:
                    _say(json.dumps(asdict(row)))
                rows += measured
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    sys.stdout.write(json.dumps({"machine": machine(device), "rows": [asdict(row) for row in rows]}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
