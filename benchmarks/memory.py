"""What `train.memory` says that a pass takes, beside the most that the GPU had in use while it was trained on.

One sample of each shape is one step of the trainer itself (`train.replica`), forward, backward and AdamW, with a second
batch on the device, as one is uploaded while another is worked on. The estimate is asked with this sample's own rows, as
the stage asks before it trains; `aerie plan` asks for a pass of that length that is supervised throughout. A pass that
would not fit is computed in slices, and the row says in how many. Value and reference are GiB: estimated and measured
(`torch.cuda.max_memory_allocated`); a good ratio is 1.00 to 1.10.

    python benchmarks/memory.py [--cases S2048,S8192] [--densities 70,30] [--small] [--out FOLDER]

Without a GPU, or with `--small`, on the CPU; its reference is then the whole process, interpreter and libraries included.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from typing import Literal

import torch
from rows import Row, command_line, publish

from eagle3_core.bench.cases import CASES, Case, make
from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.step import PackedBatch
from eagle3_core.jobs.sections.training import Training
from eagle3_core.train.memory import USABLE, Rows, gib
from eagle3_core.train.prefetch import tensors_of
from eagle3_core.train.replica import Place, Replica

KINDS: tuple[tuple[Literal["eagle3", "eagle3.1"], bool], ...] = (
    ("eagle3", False),
    ("eagle3", True),
    ("eagle3.1", True),
)
"""Algorithm, and whether the head is trained; the last is what a job has unless it says otherwise."""


def row(
    case: Case, density: int, algorithm: Literal["eagle3", "eagle3.1"], *, train_head: bool, device: torch.device
) -> Row:
    """One step of the trainer, measured."""
    case = replace(case, algorithm=algorithm)
    training = Training(ttt_steps=case.steps, train_lm_head=train_head, algorithm=algorithm)
    dtype, room = torch.float32, None
    if device.type == "cuda":
        dtype, room = torch.bfloat16, int(USABLE * torch.cuda.get_device_properties(device).total_memory)
    work = make(case, density / 100, device, train_head=train_head)
    drafter, teacher = work.drafter.at("cpu", torch.float32), work.teacher.to("cpu", torch.float32)
    for name, weight in work.drafter.weights.items():
        drafter.weights[name] = drafter.weights[name].detach().requires_grad_(weight.requires_grad)
    batch = _on(work.batch("serving"), torch.device("cpu"))
    del work
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    place = Place(device, dtype, room=room)
    replica = Replica(drafter, teacher, Objective(case.steps), training, place)
    here, ahead = _on(batch, device), _on(batch, device)
    demand = place.demand(drafter.config, training)
    rows = Rows(case.tokens, len(batch.plan.start_M), int(batch.plan.depth_M.sum()))
    slices = demand.slices(rows, room)
    replica.update(replica.learn(here, last=True)[1], training.lr)
    del here, ahead
    cut = f", {slices} slices" if slices > 1 else ""
    name = f"{case.name}, {density} % supervised, {algorithm}, {'trained' if train_head else 'frozen'} head{cut}"
    measured = Row(name, gib(demand.peak(rows, slices=slices)), "GiB estimated", gib(_peak(device)))
    sys.stderr.write(
        f"{name}: {measured.value:.2f} GiB estimated, {measured.reference:.2f} measured, {measured.ratio:.3f}\n"
    )
    return measured


def _on(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """A copy of `batch` on `device`."""
    return replace(batch, **{name: tensor.to(device, copy=True) for name, tensor in tensors_of(batch)})


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Measure what was asked for."""
    options = command_line(__doc__ or "")
    options.add_argument("--cases", default="S2048,S8192,K4096,S131072")
    options.add_argument("--densities", default="70,30")
    asked = options.parse_args()
    small = asked.small or not torch.cuda.is_available()
    device = torch.device("cpu" if small else "cuda")
    cases = ["T96"] if small else asked.cases.split(",")
    found = [
        row(CASES[name], density, algorithm, train_head=head, device=device)
        for name in cases
        for density in map(int, asked.densities.split(","))
        for algorithm, head in KINDS
    ]
    publish("memory", found, asked.out)


if __name__ == "__main__":
    main()
