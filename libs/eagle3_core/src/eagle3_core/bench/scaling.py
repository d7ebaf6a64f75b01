"""The training step on several GPUs of one machine: how much of N GPUs is left, and where the rest goes.

    torchrun --standalone --nproc-per-node N -m eagle3_core.bench.scaling [--device cpu] [--cases S8192] [--densities 70,30]

Work is chats of about 1,024 tokens. `weak` gives every GPU as many tokens as one had, `strong` shares one GPU's tokens;
samples go to ranks as in a run (`train.feed`), by their cost. Each row's `ratio` is tokens/s over N times those of one
GPU alone over the same tokens, a step for each pass, measured in the same run: the mean of the N cards, since no two are
equally fast, each working by itself while the others do. A step takes as long as the rank with
the most work, and then its collectives: `imbalance` is what the slowest rank's own work takes over the mean (0.05 = 5 %
longer), `communication` the share of a step that is left when that is taken away. Rank 0 writes one JSON document to
stdout.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from eagle3_core.bench.cases import CASES, Case, make, spans
from eagle3_core.bench.train import machine
from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.step import PackedBatch
from eagle3_core.drafter.testing import MemorySample, MemorySamples, tiny_contract
from eagle3_core.jobs.spec import Training
from eagle3_core.shards.format import kept_positions
from eagle3_core.train.cost import Weights
from eagle3_core.train.feed import Feed, Group, Pass
from eagle3_core.train.prefetch import tensors_of
from eagle3_core.train.ranks import Ranks, join, leave
from eagle3_core.train.replica import Held, Place, hold

WARM_UP, TIMED = 3, 10
RATE = 1e-6
Scaling = Literal["weak", "strong"]


@dataclass(frozen=True)
class Row:
    """One way to share one shape's step."""

    impl: str
    case: str
    density: int
    scaling: str
    gpus: int
    ms: float
    tokens_per_s: float
    peak_gib: float | None
    """On the GPU with the highest."""
    ratio: float
    """tokens_per_s over gpus x those of one."""
    communication: float
    imbalance: float


class Measuring:
    """One rank's side of the measurements of one case and density."""

    def __init__(self, case: Case, density: int, device: torch.device, ranks: Ranks) -> None:
        self._case, self._density, self._device, self._ranks = case, density, device, ranks
        self._work = make(replace(case, tokens=64), density / 100, device, train_head=True)
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._samples = _chats(case, density / 100, ranks.size, self._dtype)
        self._feed = Feed(
            self._samples, steps=case.steps, rule="serving", batch_tokens=case.tokens, seed=0,
            weights=Weights.of(case.config()),
        )  # fmt: skip

    def rows(self) -> list[Row]:
        """One GPU, then all of them in each way."""
        whole = self._feed.groups(0, self._ranks.size)[0]
        one = sum(self._alone(whole[i : i + 1]) for i in range(len(whole))) / len(whole)
        found = [self._row("aerie, one GPU", "weak", 1, one, len(whole), one * len(whole))]
        shardings: tuple[Literal["ddp", "fsdp2"], ...] = ("ddp", "fsdp2")
        for sharding in shardings:
            found.append(self._shared(sharding, "weak", whole, one))
            found.append(self._shared(sharding, "strong", whole[:1], self._alone(whole[:1])))
        return found

    def _shared(self, sharding: Literal["ddp", "fsdp2"], scaling: Scaling, group: Group, one: float) -> Row:
        """All ranks over `group`; `one` is what one GPU takes for a pass."""
        batches = self._loaded(self._feed.shared(group, self._ranks.size)[self._ranks.rank])
        together, peak = self._taken(self._held(sharding, self._ranks), batches, self._ranks)
        own, _ = self._taken(self._held("ddp", Ranks()), batches, Ranks())
        step, slowest = self._slowest(together), self._slowest(own)
        row = self._row(f"aerie, {sharding}", scaling, self._ranks.size, one, len(group), step)
        return replace(
            row, peak_gib=None if peak is None else self._slowest(peak), communication=max(0.0, 1 - slowest / step),
            imbalance=slowest / self._mean(own) - 1,
        )  # fmt: skip

    def _taken(self, held: Held, batches: Sequence[PackedBatch | None], ranks: Ranks) -> tuple[float, float | None]:
        """Seconds of a step, and the peak of memory in GiB."""
        return self._timed(lambda: _step(held, batches, ranks)), _peak(self._device)

    def _alone(self, group: Sequence[Pass]) -> float:
        """Seconds of a step over `group` on one GPU: the mean of all of them, each by itself, at the same time."""
        held, batches = self._held("ddp", Ranks()), self._loaded(group)
        seconds = self._timed(lambda: _step(held, batches, Ranks()))
        return self._mean(seconds)

    def _row(self, impl: str, scaling: Scaling, gpus: int, one: float, passes: int, seconds: float) -> Row:
        """`one` is what one GPU takes for a pass, `seconds` what was taken for `passes` of them."""
        tokens = sum(self._feed.tokens_in(p) for p in self._feed.groups(0, self._ranks.size)[0][:passes])
        return Row(
            impl, self._case.name, self._density, scaling, gpus, seconds * 1000, tokens / seconds, None,
            one * passes / (gpus * seconds), 0.0, 0.0,
        )  # fmt: skip

    def _held(self, sharding: Literal["ddp", "fsdp2"], ranks: Ranks) -> Held:
        training = Training(ttt_steps=self._case.steps, sharding=sharding)
        place = Place(self._device, self._dtype, ranks)
        return hold(self._work.drafter, self._work.teacher, Objective(self._case.steps), training, place)

    def _loaded(self, passes: Sequence[Pass]) -> list[PackedBatch | None]:
        return [None if not p else _moved(self._feed.load(p), self._device) for p in passes]

    def _timed(self, step: Callable[[], Tensor]) -> float:
        """Seconds of a step, mean of several back to back."""
        for _ in range(WARM_UP):
            step()
        _finish(self._device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(TIMED):
            step()
        _finish(self._device)
        return (time.perf_counter() - began) / TIMED

    def _everyones(self, value: float) -> Tensor:
        values = torch.zeros(self._ranks.size, dtype=torch.float64, device=self._device)
        values[self._ranks.rank] = value
        return self._ranks.add_up(values)

    def _slowest(self, value: float) -> float:
        return float(self._everyones(value).max())

    def _mean(self, value: float) -> float:
        return float(self._everyones(value).mean())


def _step(held: Held, batches: Sequence[PackedBatch | None], ranks: Ranks) -> Tensor:
    """A step as the loop takes it."""
    sums = None
    for i, batch in enumerate(batches):
        of_pass = held.learn(batch, last=i == len(batches) - 1)
        sums = of_pass if sums is None else sums + of_pass
    assert sums is not None
    return held.update(ranks.add_up(sums)[1], RATE)


def _chats(case: Case, density: float, passes: int, dtype: torch.dtype) -> MemorySamples:
    """Samples of 512 to 1,536 tokens, enough for `passes` passes, each with its own share around `density`."""
    drawn = random.Random(7)  # noqa: S311
    generator = torch.Generator().manual_seed(7)
    samples: list[MemorySample] = []
    total = 0
    while total < case.tokens * (passes + 1):
        tokens = min(case.tokens, drawn.randint(512, 1536))
        total += tokens
        mask_T = spans(tokens, min(0.95, density * drawn.uniform(0.7, 1.3)), case.turn, seed=len(samples))
        kept = kept_positions(mask_T)
        samples.append(
            MemorySample(
                torch.randint(0, case.vocab, (tokens,), generator=generator, dtype=torch.int32), mask_T,
                torch.randn(tokens, 3 * case.hidden, generator=generator).to(dtype),
                torch.randn(len(kept), case.hidden, generator=generator).to(dtype), kept,
            )
        )  # fmt: skip
    return MemorySamples(tiny_contract(case.hidden, case.vocab), tuple(samples))


def _moved(batch: PackedBatch, device: torch.device) -> PackedBatch:
    return replace(batch, **{name: tensor.to(device) for name, tensor in tensors_of(batch)})


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _peak(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None


def main(arguments: Sequence[str]) -> int:
    """Measure on all ranks; rank 0 writes the document."""
    parser = argparse.ArgumentParser(prog="python -m eagle3_core.bench.scaling")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", default="S8192,K4096")
    parser.add_argument("--densities", default="70,30")
    asked = parser.parse_args(arguments)
    ranks, device = join(asked.device)
    rows: list[Row] = []
    for name in asked.cases.split(","):
        for density in map(int, asked.densities.split(",")):
            rows += Measuring(CASES[name], density, device, ranks).rows()
            if ranks.first:
                sys.stderr.write(json.dumps([asdict(row) for row in rows[-5:]]) + "\n")
    if ranks.first:
        sys.stdout.write(json.dumps({"machine": machine(device), "rows": [asdict(row) for row in rows]}) + "\n")
    leave()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
