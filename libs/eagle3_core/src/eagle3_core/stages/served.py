"""Verifier and drafter served as production will serve them, and what that delivers on one slice of the prompts.

The drafter is exported by the same code that packages it, so what is measured here is, byte for byte, what `package`
hands out (which checks it). Two servers run side by side, since only turns taken within minutes compare: their KV caches
are made just large enough for the evaluation, and the verifier that decoded before is let go of on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from eagle3_core.drafter.export import write_sglang
from eagle3_core.drafter.model import Drafter
from eagle3_core.engine.config import SPARE_TOKENS
from eagle3_core.engine.config import Drafter as Drafting
from eagle3_core.engine.server import Server, running_server
from eagle3_core.engine.settings import read_settings, require_engine, server_config
from eagle3_core.evaluate.served import Delivered, Exported, deliver, folder_digest, require_comparable
from eagle3_core.evaluate.speed import measure_speed
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.posted import reading_verifier
from eagle3_core.stages.warm import reporting
from eagle3_core.verifier.base import Decoding, Progressed

LEAST_KV_CACHE = 4096
"""Tokens: an engine wants room for its own warm-up too."""


@dataclass(frozen=True)
class Servers:
    """The verifier twice: alone, and with the drafter."""

    plain: Server
    drafting: Server

    def check(self) -> None:
        """Raise ServerFailed, with the end of its log, if one of them has ended."""
        self.plain.check()
        self.drafting.check()


def passes(spec: JobSpec) -> int:
    """How often evaluate answers every prompt: for the promise, and where an engine serves on both of its servers."""
    return 3 if spec.verifier.backend == "sglang" else 1


def longest(spec: JobSpec, positions: int) -> int:
    """Tokens at which prompt and answer end, of a verifier of so many positions; the engine ends them a little earlier."""
    if spec.verifier.backend != "sglang":
        return positions
    held = spec.verifier.engine.kv_cache_tokens
    return min(positions, held if held is not None else positions) - SPARE_TOKENS - spec.evaluation.num_steps - 1


def served(
    ctx: StageContext,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    how: Decoding,
    *,
    device: Literal["cpu", "cuda"],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each prompt's `served` part of its row, and the facts of serving (see `evaluate.promise`).

    `drafter` is in float32, as it was trained. The first unit of a job measures the speed-up too.

    Raises what starting servers raises, NotDrafting, OtherDrafter, ServersDiffer, AnswerUnusable.
    """
    evaluation, dtype = ctx.spec.evaluation, ctx.spec.verifier.dtype
    if device == "cuda":
        _leave_gpu(ctx)
    folder = ctx.scratch / "sglang"
    write_sglang(drafter, folder, getattr(torch, dtype))
    exported = Exported(folder, evaluation.num_steps, folder_digest(folder))
    levels = evaluation.speed_in_flight if ctx.assignment.unit.index == 0 else ()
    room = _kv_cache_tokens(prompts, how, max([how.batch_size, *levels]), exported.num_steps)
    progress = reporting(ctx, len(prompts) * passes(ctx.spec), "prompts", before=len(prompts))
    with _servers(ctx, exported, device, room) as servers:
        plain, drafting = servers.plain.client, servers.drafting.client
        engine = require_comparable(plain, drafting, exported)
        done = deliver(
            plain, drafting, prompts, how, near_tie_logit_gap=ctx.spec.near_tie_logit_gap, exact=dtype == "float32",
            on_progress=_watching(ctx, servers, progress),
        )  # fmt: skip
        speedup = measure_speed(plain, drafting, prompts, how, levels, on_progress=_watching(ctx, servers))
    facts = {
        "engine": f"SGLang {engine['version']}", "device": engine["device"], "dtype": dtype, "drafter": exported.digest,
        "exact": dtype == "float32", "speedup": speedup,
    }  # fmt: skip
    return [_row(delivered) for delivered in done], facts


def _leave_gpu(ctx: StageContext) -> None:
    """Give the memory of this process's verifier back to the driver: the servers are processes of their own."""
    ctx.warm.release()
    gc.collect()  # its hooks refer back to it
    torch.cuda.empty_cache()


@contextmanager
def _servers(
    ctx: StageContext, exported: Exported, device: Literal["cpu", "cuda"], kv_cache_tokens: int
) -> Generator[Servers]:
    """Both servers, up to the end of the block."""
    settings = read_settings()
    version = require_engine(settings).version
    spec = ctx.spec.verifier
    if spec.engine.kv_cache_tokens is None:
        spec = spec.model_copy(
            update={"engine": spec.engine.model_copy(update={"kv_cache_tokens": kv_cache_tokens})}
        )  # fmt: skip
    drafter = Drafting(model=exported.folder.absolute(), num_steps=exported.num_steps)
    with reading_verifier(ctx) as model:
        ctx.log(f"starting SGLang {version} twice on {device}: with the drafter and without")
        with (
            running_server(
                server_config(spec, model, device, settings, drafter=drafter), settings, say=ctx.log, go_on=ctx.check
            ) as drafting,
            running_server(
                server_config(spec, model, device, settings), settings, say=ctx.log, go_on=ctx.check
            ) as plain,
        ):
            ctx.log("both servers are up")
            yield Servers(plain, drafting)


def _watching(ctx: StageContext, servers: Servers, report: Progressed | None = None) -> Progressed:
    """`report`, while both servers live and nobody asks to stop."""

    def watch(*, done: int, tokens: int) -> None:
        servers.check()
        ctx.check()
        if report is not None:
            report(done=done, tokens=tokens)

    return watch


def _kv_cache_tokens(prompts: Sequence[Sequence[int]], how: Decoding, in_flight: int, num_steps: int) -> int:
    """Room for so many requests with their longest answers. The engine books drafts ahead of every request, twice."""
    longest = max(len(prompt) + how.limit(len(prompt)) for prompt in prompts)
    return max(LEAST_KV_CACHE, 2 * in_flight * (longest + 4 * (num_steps + 1)))


def _row(done: Delivered) -> dict[str, Any]:
    answer, verdict = done.answer, done.verdict
    return {
        "tokens": len(answer.ids) - 1, "calls": answer.calls, "by_right": list(answer.by_right),
        "lossless": verdict.equal or verdict.near_tie, "near_tie": verdict.near_tie,
    }  # fmt: skip
