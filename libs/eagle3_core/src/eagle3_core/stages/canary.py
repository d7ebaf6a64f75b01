"""Ten samples through every later stage, generate to package, before the rest begins.

A job that cannot succeed must die in minutes, not after a night of extraction: wrong layers, a template the tokenizer
rejects, a batch that does not fit, a drafter that its own package cannot reload. So the canary keeps every setting that
can break something (layers, batch sizes, draft depth, algorithm) and shrinks only what costs time. The longest sample
is always among the ten, since it is the one that does not fit. What the drafter is worth is no question here: after
two steps it is worth nothing, and a verdict of `fail` is expected.

Its files live in the scratch folder and go with it; its result names what was proven.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eagle3_core.data import conversations
from eagle3_core.data.tokensets import TokenSet
from eagle3_core.engine.allowed import endpoints_of, read_allowed
from eagle3_core.engine.settings import read_settings, require_backend
from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import StageName, stages_of
from eagle3_core.jobs.refusals import Preempted
from eagle3_core.jobs.spec import Gate, JobSpec
from eagle3_core.jobs.wire import UNEVEN, Commit, LogLine, Metric, Output, Progress
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import UnitWriter
from eagle3_core.stages.chain import Chain
from eagle3_core.stages.context import Reporter, StageContext

SAMPLES = 10
PROMPTS = 2
NEW_TOKENS = 16
STEPS = 2
DONE_BEFORE = frozenset({"prepare", "canary"})


class Whisper:
    """The nested stages' reports: their logs and what they are at, but none of their curves, which would be noise."""

    def __init__(self, reporter: Reporter, done: int, total: int, stage: StageName) -> None:
        self._reporter = reporter
        self._done, self._total, self._stage = done, total, stage

    def progress(self, progress: Progress) -> None:
        """Move on by the share of the nested stage that is done."""
        share = min(1.0, progress.done / progress.total) if progress.total else 0.0
        self._reporter.progress(
            Progress(
                done=self._done + share,
                total=self._total,
                unit=UNEVEN,
                tokens_per_s=progress.tokens_per_s,
                note=f"{self._stage} {progress.note}".strip(),
            )
        )

    def metric(self, metric: Metric) -> None:
        """Drop it."""

    def log(self, line: LogLine) -> None:
        """Pass it on with the nested stage's name, unless it warns.

        A nested stage warns of its data (the vocabulary is small, a sample has no chain), and ten samples are not the job's.
        What the job's own data deserve the stage says itself, later; what is fatal raises.
        """
        if line.level == "warning":
            return
        self._reporter.log(line.model_copy(update={"text": f"{self._stage}: {line.text}"}))


def tiny(spec: JobSpec) -> JobSpec:
    """`spec` with everything that costs time cut down, and everything that can break kept."""
    data, training = spec.data, spec.training
    new_tokens = min(NEW_TOKENS, data.regenerate.max_new_tokens)
    return spec.model_copy(
        update={
            "data": data.model_copy(
                update={
                    "unit_samples": SAMPLES,
                    "regenerate": data.regenerate.model_copy(update={"max_new_tokens": new_tokens}),
                }
            ),
            # Ten samples say nothing about coverage; the draft vocabulary clamps itself to their distinct tokens.
            "vocab": spec.vocab.model_copy(update={"min_coverage": 0.0}),
            "training": training.model_copy(
                update={
                    "epochs": STEPS * training.accumulation,
                    "max_steps": STEPS,
                    "checkpoint_every_steps": 1,
                    "keep_checkpoints": 1,
                    "threads": None,
                }
            ),
            "evaluation": spec.evaluation.model_copy(
                update={
                    "unit_prompts": PROMPTS,
                    "max_new_tokens": min(NEW_TOKENS, spec.evaluation.max_new_tokens),
                    "speed_in_flight": (),
                    "gate": Gate(),
                }
            ),
        }
    )


def ten_of(samples: TokenSet) -> TokenSet:
    """The first nine samples and the longest of the others; all where there are no more than ten."""
    if len(samples) <= SAMPLES:
        return samples
    rest = samples.slice(SAMPLES - 1, len(samples))
    longest = int(np.argmax(rest.lengths))
    return TokenSet.concat([samples.slice(0, SAMPLES - 1), rest.slice(longest, longest + 1)])


def canary(ctx: StageContext) -> Commit:
    """Prove on ten samples that every later stage of this job can succeed, the packaged drafter's reload included."""
    require_backend(ctx.spec.verifier, read_settings())  # what is not there should not be found out stage by stage
    for named, pointer in endpoints_of(ctx.spec):
        read_allowed().client(named, ctx.assignment.tenant, pointer)
    store = LocalStore(ctx.scratch / "objects")
    stages: list[StageName] = [stage.name for stage in stages_of(ctx.spec) if stage.name not in DONE_BEFORE]
    seed = _prepared(ctx, store)
    chain = Chain(
        tiny(ctx.spec), store, ctx.scratch / "chain", ctx.file_roots, tenant=ctx.assignment.tenant, job_id="canary",
        sources=ctx.assignment.sources, warm=ctx.warm, stop=ctx.stop,
    )  # fmt: skip
    chain.seed("prepare", [seed])
    timings: dict[str, float] = {}
    for done, name in enumerate(stages):
        ctx.check()
        chain.reporter = Whisper(ctx.reporter, done, len(stages), name)
        chain.reporter.progress(Progress(done=0, total=1))
        try:
            timings[name] = chain.run(name).seconds
        except Preempted:
            raise
        except AerieError as error:
            error.context["canary_stage"] = name
            ctx.log(f"the canary died in {name}: {error.detail}", level="error")
            raise
    ctx.progress(len(stages), len(stages), UNEVEN)
    result = {"stages": [{"name": name} for name in stages], "samples": seed.result["samples"]}
    return ctx.done(ctx.writer().commit(result, timings=timings), result)


def _prepared(ctx: StageContext, store: LocalStore) -> Output:
    """Prepare's output, cut to ten samples and two prompts, as if prepare had written it to `store`."""
    (manifest,) = ctx.manifests("prepare")
    train = ten_of(TokenSet.load(ctx.fetch(manifest.file("train.safetensors"))))
    held_out = TokenSet.load(ctx.fetch(manifest.file("eval.safetensors")))
    held_out = held_out.slice(0, min(PROMPTS, len(held_out)))
    summary = ctx.result("prepare") | {
        "samples": len(train),
        "eval_prompts": len(held_out),
        "tokens": int(train.lengths.sum()),
        "supervised_tokens": int(train.loss_mask.sum()),
    }
    key = f"{ctx.assignment.key}-prepare"
    writer = UnitWriter(
        store, tenant=ctx.assignment.tenant, job_id="canary", stage="prepare", unit=(0, 0, 1), unit_key=key, fence=1
    )
    for name, tokens in (("train.safetensors", train), ("eval.safetensors", held_out)):
        path: Path = ctx.scratch / name
        tokens.save(path)
        writer.add_file(name, path, samples=len(tokens))
    if any(entry.name == conversations.MESSAGES_FILE for entry in manifest.files):
        chosen = set(train.ids)
        whole = dict(
            pair
            for pair in conversations.load(ctx.fetch(manifest.file(conversations.MESSAGES_FILE)))
            if pair[0] in chosen
        )
        path = ctx.scratch / conversations.MESSAGES_FILE
        conversations.save(path, ((name, whole[name]) for name in train.ids))
        writer.add_file(path.name, path, samples=len(train))
    return Output(stage="prepare", key=key, manifest=writer.commit(summary), result=summary)
