"""What a pass costs on this machine, from which the report predicts a speed-up.

A chain of K drafts pays off when acceptance length x (one verifier pass over one token) exceeds one pass over K + 1
tokens plus the drafting. On a GPU the two passes cost about the same, on a CPU four tokens cost clearly more than one: so it
is measured, at batch 1, and the prediction is called one.

Shapes: B = 1 row, K drafted tokens, S slots.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from eagle3_core.drafter.model import Drafter
from eagle3_core.evaluate.decode import ChainDrafter
from eagle3_core.verifier.generation import Engine

REPEATS = 7


def _median_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Median over `REPEATS` of one run, after one that is not counted."""

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) * 1000

    once()
    return statistics.median(once() for _ in range(REPEATS))


@torch.no_grad()
def measure_costs(engine: Engine, drafter: Drafter, context: Sequence[int], num_steps: int) -> dict[str, Any]:
    """Median milliseconds behind `context` (token ids): `verify_1_ms`, `verify_chain_ms` (K + 1 tokens), `draft_ms`."""
    length, device = len(context), engine.device
    slots = length + num_steps + 1
    cache, head = engine.cache(1, slots), ChainDrafter(drafter, 1, slots)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    ids_1T = torch.tensor([list(context)], device=device)
    everything_1T = torch.arange(length, device=device)[None]
    out = engine.forward(ids_1T, everything_1T, cache, last_R=row + length - 1, states=True)
    assert out.states is not None
    head.observe(row, everything_1T, out.states.aux)
    ids_1S = torch.nn.functional.pad(ids_1T, (0, slots - length))
    known = row + length + 1
    head.draft(ids_1S, known, row, num_steps)
    aux_1nW = out.states.aux[:, :1].expand(-1, num_steps + 1, -1)
    chain_1n = torch.arange(length, length + num_steps + 1, device=device)[None]

    def draft() -> None:  # a round reads about two new pairs at the acceptance lengths seen
        head.observe(row, chain_1n, aux_1nW)
        head.draft(ids_1S, known, known - 3, num_steps)

    one, chain = ids_1S[:, length : length + 1], ids_1S[:, length:]
    return {
        "verify_1_ms": round(_median_ms(lambda: engine.forward(one, chain_1n[:, :1], cache), device), 3),
        "verify_chain_ms": round(_median_ms(lambda: engine.forward(chain, chain_1n, cache, states=True), device), 3),
        "draft_ms": round(_median_ms(draft, device), 3),
        "num_steps": num_steps,
        "context_tokens": length,
        "device": device.type,
        "threads": torch.get_num_threads(),
    }
