"""Prompts -> the verifier's own answers, and the hidden states of that very pass where the engine keeps them.

The states are committed as the output of `extract`, under the key that extract's unit has for these answers: what one
pass computed is not computed again. An engine that keeps none (SGLang, or a server that the job names) leaves them to
`extract`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

from eagle3_core.data.tokensets import TokenSet
from eagle3_core.evaluate.ngrams import loops
from eagle3_core.jobs.graph import Slice, unit_inputs, unit_key
from eagle3_core.jobs.wire import Commit, ManifestRef, Output
from eagle3_core.shards.writer import ShardWriter
from eagle3_core.stages.answering import answering
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.posted import posted_verifier
from eagle3_core.stages.prepare import states_need
from eagle3_core.stages.warm import reporting
from eagle3_core.verifier.base import Decoding, Generated, Verifier
from eagle3_core.verifier.endpoint import EndpointAnswers
from eagle3_core.verifier.sglang import SGLangVerifier
from eagle3_core.verifier.transformers import TransformersVerifier

ANSWERS_FILE = "answers.safetensors"


def generate(ctx: StageContext) -> Commit:
    """Answer one slice of the training prompts; commit the answers, and their states for `extract`."""
    unit = ctx.assignment.unit
    (prepared,) = ctx.manifests("prepare")
    prompts = TokenSet.load(ctx.fetch(prepared.file("train.safetensors"))).slice(unit.start, unit.stop)
    with answering(ctx, prompts) as verifier:
        ctx.require_room(states_need(prompts, ctx.spec, verifier.identity.hidden_size))
        keeps = isinstance(verifier, TransformersVerifier)
        shards = _shards(ctx, verifier) if keeps and ctx.spec.extraction.endpoint is None else None
        started = time.monotonic()
        answers = _answers(ctx, verifier, prompts, shards)
        seconds = time.monotonic() - started
        usage = _usage(ctx, verifier)
    posted_verifier(ctx)
    ref, result = _commit_answers(ctx, prompts, answers, usage, seconds)
    if shards is None:
        return ctx.done(ref, result)
    states = commit_states(ctx, shards, _extract_key(ctx, ref), seconds)
    return ctx.done(ref, result, [states])


def _answers(
    ctx: StageContext, verifier: TransformersVerifier | SGLangVerifier | EndpointAnswers, prompts: TokenSet,
    shards: ShardWriter | None,
) -> list[Generated]:  # fmt: skip
    """The answers to `prompts` in their order, without states; those go into `shards`."""
    spec, regenerate = ctx.spec, ctx.spec.data.regenerate
    how = Decoding(
        max_new_tokens=regenerate.max_new_tokens,
        batch_size=regenerate.batch_size,
        eos_ids=verifier.identity.eos_token_ids,
        keep_states=shards is not None,
        max_seq_len=verifier.identity.longest(spec.data.max_seq_len),
        temperature=regenerate.temperature,
        top_p=regenerate.top_p,
    )
    answers: dict[int, Generated] = {}
    asked = [prompts.sample(i)[0].tolist() for i in range(len(prompts))]
    for answer in verifier.generate(asked, how, reporting(ctx, len(prompts), "samples")):
        index = answer.index
        if shards is not None:
            assert answer.states is not None
            shards.add(prompts.ids[index], prompts.tasks[index], answer.ids, mask_of(answer), answer.states)
        answers[index] = Generated(index, answer.ids, answer.prompt_len, answer.ended, None)
    left_out = verifier.left_out if isinstance(verifier, EndpointAnswers) else frozenset[int]()
    return [answers[i] for i in range(len(prompts)) if i not in left_out]


def _usage(ctx: StageContext, verifier: object) -> dict[str, int]:
    """What a server counted, for the unit's result and its curves; nothing where no server was asked."""
    if not isinstance(verifier, EndpointAnswers):
        return {}
    counts = {name: verifier.usage[name] for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
    for name, count in counts.items():
        ctx.metric(f"endpoint_{name}", count, ctx.assignment.unit.stop)
    if left := len(verifier.left_out):
        ctx.log(
            f"{left} answers were left out: their texts do not lead back to the tokens that were sampled", "warning"
        )
    return {
        **{f"endpoint_{name}": count for name, count in counts.items()}, "retokenized": verifier.usage["retokenized"],
        "left_out": left,
    }  # fmt: skip


def _shards(ctx: StageContext, verifier: Verifier) -> ShardWriter:
    extraction = ctx.spec.extraction
    contract = verifier.contract("decode")
    return ShardWriter(ctx.scratch, contract, codec=extraction.codec, shard_bytes=extraction.shard_bytes)


def mask_of(answer: Generated) -> list[int]:
    """1 on the answer's tokens, its end-of-sequence token included; 0 on the prompt."""
    return [0] * answer.prompt_len + [1] * (len(answer.ids) - answer.prompt_len)


def _commit_answers(
    ctx: StageContext, prompts: TokenSet, answers: list[Generated], usage: Mapping[str, int], seconds: float
) -> tuple[ManifestRef, dict[str, int]]:
    tokens = TokenSet.build((prompts.ids[a.index], prompts.tasks[a.index], a.ids, mask_of(a)) for a in answers)
    path = ctx.scratch / ANSWERS_FILE
    tokens.save(path)
    result = {
        "samples": len(tokens),
        "tokens": tokens.tokens,
        "answer_tokens": tokens.supervised_tokens,
        "ended": sum(a.ended for a in answers),
        "looping": sum(loops(a.ids[a.prompt_len :]) for a in answers),
        **usage,
    }
    writer = ctx.writer()
    writer.add_file(ANSWERS_FILE, path, samples=len(tokens), tokens=tokens.tokens)
    return writer.commit(result, timings={"generate_s": seconds}), result


def _extract_key(ctx: StageContext, answers: ManifestRef) -> str:
    """The key of the unit of `extract` that reads these answers."""
    a = ctx.assignment
    inputs = unit_inputs("extract", a.spec, 0, {"generate": [answers.content], "prepare": []})
    return unit_key("extract", a.spec, Slice(a.unit.index, a.unit.start, a.unit.stop), inputs, a.sources, a.tenant)


def commit_states(
    ctx: StageContext, shards: ShardWriter, key: str, seconds: float,
    also: Mapping[str, int] = MappingProxyType({}),
) -> Output:  # fmt: skip
    """Commit `shards` as the output of extract's unit `key`; its result says `also` what was counted on the way."""
    writer = ctx.writer("extract", key)
    result = {**shards.close(writer), **also, "pass": shards.contract.capture_pass}
    ref = writer.commit(result, contract=shards.contract.model_dump(mode="json"), timings={"capture_s": seconds})
    return Output(stage="extract", key=key, manifest=ref, result=result)
