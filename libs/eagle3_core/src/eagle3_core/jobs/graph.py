"""The stages of a job: their order, what each reads, how they split into units, and when a result can be reused.

A stage is a pure function of (the digests of what it reads, its part of the job, its version). That triple is a
unit's key: the same key means the same result, so a finished unit of any job serves every later one.
What a worker leases is a unit: a whole stage, or a slice of one that fans out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eagle3_core.digests import digest_json
from eagle3_core.jobs.spec import JobSpec

StageName = Literal["prepare", "canary", "generate", "extract", "vocab", "train", "evaluate", "package"]
Queue = Literal["prep", "extract", "train", "evaluate", "extract-sglang", "evaluate-sglang"]
ON_SGLANG: Mapping[Queue, Queue] = {"extract": "extract-sglang", "evaluate": "evaluate-sglang"}
"""Where units of a queue wait that need SGLang. A worker that has it serves these beside the queues that it is told to."""


SERVING = ("endpoint", "tensor_parallel", "engine")
"""Fields of the verifier that say how an engine serves it, for the stages that serve nothing."""


PACE = ("key", "timeout_s", "in_flight")
"""Fields of a server's address that do not change what it answers."""


@dataclass(frozen=True)
class Stage:
    """One stage: `reads` names the stages whose manifests it gets, `sections` the parts of the job it depends on."""

    name: StageName
    queue: Queue
    reads: tuple[StageName, ...]
    sections: tuple[str, ...]
    version: int
    fans_out: bool = False
    drops: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Fields of a section that do not change this stage's result."""
    names: bool = False
    """Whether the result names the drafter and the place of its verifier, as a card does: then both are in the key."""


# `reads` of extract: the units of generate where it runs, else slices of prepare's samples.
STAGES: dict[StageName, Stage] = {
    stage.name: stage
    for stage in (
        # dtype and aux_layers are checked in prepare; what it commits is the same for all of them.
        Stage("prepare", "prep", (), ("verifier", "datasets", "data", "extraction", "evaluation"), 6,
              drops={"verifier": ("backend", "device", *SERVING), "extraction": ("codec", "shard_bytes", "endpoint"),
                     "evaluation": ("num_steps", "max_new_tokens", "unit_prompts", "batch_size",
                                    "near_tie_logit_gap", "speed_in_flight", "gate"),
                     "data": ("val_ratio", "unit_samples")}),
        Stage("canary", "extract", ("prepare",), ("verifier", "data", "extraction", "vocab", "training", "evaluation"), 2,
              drops={"training": ("epochs", "max_steps", "checkpoint_every_steps", "keep_checkpoints", "threads",
                                  "num_workers"),
                     "evaluation": ("prompts", "max_prompts", "unit_prompts", "gate", "max_new_tokens",
                                    "speed_in_flight"),
                     "data": ("unit_samples", "bad_rows_limit")}),
        Stage("generate", "extract", ("prepare",), ("verifier", "data"), 3, fans_out=True,
              drops={"verifier": ("engine", *(f"endpoint.{name}" for name in PACE)),
                     "data": ("val_ratio", "bad_rows_limit", "max_samples", "unit_samples")}),
        Stage("extract", "extract", ("prepare", "generate"), ("verifier", "extraction"), 3, fans_out=True,
              drops={"verifier": ("engine", "endpoint"), "extraction": tuple(f"endpoint.{name}" for name in PACE)}),
        Stage("vocab", "prep", ("prepare", "generate"), ("verifier", "vocab"), 4,
              drops={"verifier": ("dtype", "backend", "device", "revision", *SERVING)}),
        Stage("train", "train", ("extract", "vocab"), ("verifier", "data", "training"), 4,
              drops={"verifier": ("backend", *SERVING),
                     "data": ("unit_samples", "bad_rows_limit", "regenerate", "max_samples", "max_seq_len",
                              "template_arguments"),
                     "training": ("keep_checkpoints", "checkpoint_every_steps", "num_workers")}),
        Stage("evaluate", "evaluate", ("prepare", "generate", "train"), ("verifier", "evaluation"), 5, fans_out=True,
              # The engine's room for tokens cuts answers, and its other settings are what is timed.
              drops={"verifier": ("endpoint",), "evaluation": ("prompts", "gate")}),
        Stage("package", "prep", ("prepare", "vocab", "train", "evaluate"), ("verifier", "data", "training", "evaluation"), 4,
              names=True),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Slice:
    """Items `start` (inclusive) to `stop` (exclusive) of what a unit's stage works through."""

    index: int
    start: int
    stop: int


def stages_of(spec: JobSpec) -> tuple[Stage, ...]:
    """The stages that `spec` runs, in order."""
    return tuple(s for s in STAGES.values() if s.name != "generate" or spec.data.regenerate.enabled)


def queue_of(stage: Stage, spec: JobSpec) -> Queue:
    """Where the units of `stage` wait in a job of `spec`: those that need SGLang, for a worker that has it.

    Answers and states that a running server gives need none on the worker.
    """
    server = {"generate": spec.verifier.endpoint, "extract": spec.extraction.endpoint}.get(stage.name)
    if spec.verifier.backend != "sglang" or server is not None:
        return stage.queue
    return ON_SGLANG.get(stage.queue, stage.queue)


def reads_of(stage: Stage, spec: JobSpec) -> tuple[StageName, ...]:
    """The stages whose manifests `stage` gets in a job of `spec`."""
    present = {s.name for s in stages_of(spec)}
    return tuple(name for name in stage.reads if name in present)


def slices(stage: StageName, spec: JobSpec, prepared: Mapping[str, Any]) -> list[Slice]:
    """The units of `stage`. `prepared` is prepare's result, with `samples` and `eval_prompts` (ignored before it ran)."""
    if not STAGES[stage].fans_out:
        return [Slice(0, 0, 1)]
    total, size = (
        (int(prepared["eval_prompts"]), spec.evaluation.unit_prompts)
        if stage == "evaluate"
        else (int(prepared["samples"]), spec.data.unit_samples)
    )
    return [Slice(i, start, min(start + size, total)) for i, start in enumerate(range(0, total, size))]


def unit_inputs(
    stage: StageName, spec: JobSpec, index: int, digests: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Content digests (unit by unit) of what unit `index` of `stage` reads.

    Extract's unit i reads only generate's unit i, so its key depends on no other slice's answers.
    """
    chosen: dict[str, list[str]] = {}
    for name in reads_of(STAGES[stage], spec):
        both = list(digests[name])
        if stage == "extract" and name == "generate":
            both = [both[index]]
        if stage == "extract" and name == "prepare" and spec.data.regenerate.enabled:
            continue
        chosen[name] = both
    return chosen


def _without(section: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """`section` without the fields `names`; `outer.inner` leaves out a field of a field."""
    kept = {name: value for name, value in section.items() if name not in names}
    for outer, _, inner in (name.partition(".") for name in names):
        if inner and isinstance(kept.get(outer), dict):
            kept[outer] = _without(kept[outer], (inner,))
    return kept


def unit_key(
    stage: StageName,
    spec: JobSpec,
    unit: Slice,
    inputs: Mapping[str, Sequence[str]],
    sources: Mapping[str, str],
    tenant: str,
) -> str:
    """The key of one unit (hex BLAKE3).

    `inputs` comes from `unit_inputs`; `sources` are digests of what lies outside the house: `verifier` and one per
    dataset URI. The tenant is part of every key, since hidden states reveal their text.
    """
    entry = STAGES[stage]
    document = spec.model_dump(mode="json")
    config: dict[str, Any] = {}
    for section in entry.sections:
        value = document[section]
        if isinstance(value, dict):
            value = _without(value, entry.drops.get(section, ()))  # type: ignore[reportUnknownArgumentType]
        config[section] = value
    # The last bits depend on the threads; where a job names none, they are the machine's and no part of it.
    if (threads := document["resources"].get(stage, {}).get("threads")) is not None:
        config["threads"] = threads
    if entry.names:
        config["name"] = spec.name
    elif "verifier" in config:
        config["verifier"]["model"] = sources["verifier"]
    return digest_json(
        {
            "stage": stage,
            "version": entry.version,
            "unit": [unit.index, unit.start, unit.stop] if entry.fans_out else None,
            "config": config,
            "inputs": {k: list(v) for k, v in inputs.items()},
            "sources": dict(sources) if stage == "prepare" else {},
            "tenant": tenant,
        }
    )
