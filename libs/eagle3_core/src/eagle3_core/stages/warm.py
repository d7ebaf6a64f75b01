"""The verifier that a process keeps between units, and how its work is reported.

Loading a large verifier takes minutes and a unit takes seconds to minutes, so generate, extract and evaluate of one job
share one loaded verifier, as long as it is the same checkpoint in the same precision with the same captured layers.
"""

from __future__ import annotations

import time

from eagle3_core.digests import digest_json
from eagle3_core.engine.settings import read_settings
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.posted import posted_verifier, reading_verifier
from eagle3_core.text import pace
from eagle3_core.verifier.base import Progressed
from eagle3_core.verifier.sglang import SGLangVerifier
from eagle3_core.verifier.transformers import TransformersVerifier

CURVE_EVERY_S = 2.0
"""Time between two points of a rate's curve; the last is always drawn."""


def warm_verifier(ctx: StageContext) -> TransformersVerifier:
    """The job's verifier, loaded now or by an earlier unit. Raises VerifierChanged and what loading raises."""
    spec, identity = ctx.spec.verifier, posted_verifier(ctx)

    def load() -> TransformersVerifier:
        ctx.log(f"loading the verifier {identity.name} in {spec.dtype}")
        started = time.monotonic()
        with reading_verifier(ctx) as folder:
            verifier = TransformersVerifier(folder, spec, ctx.spec.extraction.aux_layers, identity)
        ctx.log(f"loaded the verifier in {time.monotonic() - started:.1f} s on {verifier.device}")
        return verifier

    layers = ctx.spec.extraction.aux_layers
    key = digest_json(
        [identity.digest, spec.revision, spec.dtype, spec.backend, spec.device, list(layers) if layers else None]
    )
    return ctx.warm.get(key, load)


def warm_engine(ctx: StageContext) -> TransformersVerifier | SGLangVerifier:
    """The job's verifier on the engine that the job names: what generates and captures.

    Raises VerifierChanged, EngineMissing, and what loading raises.
    """
    spec = ctx.spec.verifier
    if spec.backend == "transformers":
        return warm_verifier(ctx)
    identity, layers = posted_verifier(ctx), ctx.spec.extraction.aux_layers
    settings = read_settings()
    stated = spec.model_dump(mode="json", exclude={"model", "endpoint"})
    key = digest_json([identity.digest, stated, list(layers) if layers else None])

    def start() -> SGLangVerifier:
        with reading_verifier(ctx) as folder:
            return SGLangVerifier(folder, spec, layers, identity, settings)

    verifier: SGLangVerifier = ctx.warm.get(key, start)
    verifier.say, verifier.go_on = ctx.log, ctx.check
    return verifier


def reporting(ctx: StageContext, total: int, unit: str, before: int = 0) -> Progressed:
    """A callback that reports `done` of `total` (counted in `unit`) and both rates since the start, and honours stops.

    `before` of the total were done by what went before, at a pace of its own. The rates' curves count from the stage's
    first sample, so that those of its units join.
    """
    started = measured = time.monotonic()

    def report(*, done: int, tokens: int) -> None:
        nonlocal measured
        ctx.check()
        now = time.monotonic()
        elapsed = now - started
        rate = done / elapsed if done and elapsed else None
        tokens_per_s = tokens / elapsed if elapsed else None
        note = "" if tokens_per_s is None else f"{pace(tokens_per_s)} tokens/s"
        ctx.progress(before + done, total, unit, rate=rate, tokens_per_s=tokens_per_s, note=note)
        if rate is not None and (before + done == total or now - measured >= CURVE_EVERY_S):
            measured, step = now, ctx.assignment.unit.start + before + done
            ctx.metric(f"{unit}_per_s", rate, step)
            ctx.metric("tokens_per_s", tokens / elapsed, step)

    return report
