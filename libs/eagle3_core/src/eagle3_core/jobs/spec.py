"""The job: the one model that API, command line, worker, stages and documentation share.

Unknown fields are errors, every field says what it does, every default is sourced or measured. A value that this
version cannot carry out is not in the schema, so a job is refused when it is posted and not hours later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[FiniteFloat, Field(ge=0, le=1)]


NEAR_TIE_LOGIT_GAP = {"float32": 0.0, "bfloat16": 0.25, "float16": 0.03125}
"""Two units in the last place of a logit between 16 and 32, in which different batch shapes may round differently."""


class Section(BaseModel):
    """A part of a job: frozen, and closed to unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class VerifierSpec(Section):
    """The large model whose tokens are drafted."""

    model: Annotated[str, Field(min_length=1)]
    """Folder of a Hugging Face checkpoint (config, tokenizer with chat template, safetensors), absolute or `file:` URI."""

    revision: str = "local"
    """Revision of the checkpoint; part of the capture contract."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision in which the verifier runs. Losslessness is exact only in float32."""

    backend: Literal["transformers"] = "transformers"
    """Engine that generates and captures."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; `auto` takes a GPU where there is one."""


class DatasetSpec(Section):
    """One source of prompts or conversations."""

    uri: Annotated[str, Field(min_length=1)]
    """`file:` URI or path of a JSONL file, under a root that the operator lists."""

    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompts"] = "auto"
    """Shape of a line; `auto` decides by the first line's fields."""

    weight: Annotated[FiniteFloat, Field(ge=1e-6, le=1e6)] = 1.0
    """Share of this source among all, relative to the other weights, when `max_samples` of the mix binds."""

    max_samples: Positive | None = None
    """At most this many samples of this source, in file order."""


class Regenerate(Section):
    """The verifier writes the answers itself: the largest single lever on acceptance (SpecForge v0.3 release notes)."""

    enabled: bool = True
    """Replace the last assistant turn (or answer the last user turn) by the verifier's own greedy answer."""

    max_new_tokens: Annotated[int, Field(ge=1, le=131072)] = 1024
    """Longest answer, in tokens; a longer one is cut and used as it is."""

    batch_size: Annotated[int, Field(ge=1, le=4096)] = 64
    """Answers decoded side by side."""


class Data(Section):
    """How sources become samples."""

    max_samples: Positive | None = None
    """At most this many samples over all sources, drawn by their weights."""

    max_seq_len: Annotated[int, Field(ge=8, le=1048576)] = 4096
    """Longest sample in tokens; longer conversations are cut at the end, prompts that leave no room are dropped."""

    val_ratio: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.05
    """Share of the samples held back to watch the training loss."""

    bad_rows_limit: Share = 0.01
    """Share of unusable lines (broken JSON, wrong roles, nothing to train on) above which the job is refused."""

    unit_samples: Positive = 256
    """Samples of one unit of `generate` and `extract`: what one worker leases and a death costs."""

    regenerate: Regenerate = Regenerate()


class Extraction(Section):
    """How hidden states are captured."""

    aux_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Three layer *inputs* to capture, strictly increasing (layer i's input = Hugging Face `hidden_states[i]`).
    Default [2, N//2, N-3]; models of fewer than 7 layers name theirs."""

    codec: Literal["raw"] = "raw"
    """How states are stored."""

    shard_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """Largest shard file, in bytes."""

    @model_validator(mode="after")
    def _three_increasing(self) -> Extraction:
        layers = self.aux_layers
        if layers is not None and (len(layers) != 3 or list(layers) != sorted(set(layers))):
            raise ValueError("aux_layers must be three strictly increasing layer numbers")
        return self


class Vocab(Section):
    """The drafter's vocabulary: the most frequent tokens of the training answers."""

    draft_vocab_size: Annotated[int, Field(ge=1)] | None = 32000
    """Tokens the drafter can propose; clamped, and said, when the data holds fewer distinct ones. null = all."""

    min_coverage: Share = 0.8
    """Least share of supervised tokens that the draft vocabulary must cover; below it the job fails early."""


class Training(Section):
    """How the drafter is trained. Defaults: eagle3.1, trained head, soft cross-entropy, equal step weights."""

    algorithm: Literal["eagle3.1", "eagle3"] = "eagle3.1"
    """`eagle3.1` norms each aux state before `fc` and feeds back normed states (+.24 AL measured at 989k tokens)."""

    init: Literal["random", "verifier_layer"] = "random"
    """Start of the drafter's layer: random, or a copy of the verifier's last layer (Llama-shaped verifiers)."""

    epochs: Positive = 3
    """Passes over the training samples, unless `max_steps` ends the run earlier."""

    max_steps: Positive | None = None
    """Optimizer steps after which training ends."""

    lr: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1e-4
    """Peak learning rate of AdamW. 5e-5 for hidden sizes from 7,168 on (gradient outliers at 1e-4)."""

    scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    """Course of the learning rate after the warm-up."""

    min_lr_ratio: Share = 0.0
    """Learning rate at the end, as a share of the peak (not for `constant`)."""

    warmup_ratio: Share = 0.03
    """Share of the steps in which the learning rate rises from 0."""

    clip: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    """Largest gradient norm (L2, all parameters)."""

    betas: tuple[Annotated[FiniteFloat, Field(ge=0, lt=1)], Annotated[FiniteFloat, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW's decay rates."""

    weight_decay: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""

    ttt_steps: Annotated[int, Field(ge=1, le=16)] = 3
    """Steps of the training-time test. Train at least as deep as you serve; cost grows with it."""

    step_weights: Literal["equal", "decay", "survival"] = "equal"
    """Weight of step k: 1, `ttt_decay`^k, or the running chance that the chain is still alive; normalised to sum 1."""

    ttt_decay: Annotated[FiniteFloat, Field(gt=0, le=1)] = 0.8
    """Factor of `step_weights: decay`."""

    loss: Literal["soft_ce", "kl", "tv", "lk"] = "soft_ce"
    """Distance between the verifier's and the drafter's distribution over the draft vocabulary."""

    expected_length_weight: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Weight of (K - expected accepted tokens) beside the loss (+.022 AL measured with 4)."""

    label_rule: Literal["serving", "speculators"] = "serving"
    """`serving` trains exactly the chains that serving can run; `speculators` reproduces that library, for parity."""

    train_lm_head: bool = True
    """Train the drafter's own output head (-.018 AL measured when frozen)."""

    noise_std: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    """Half-width of uniform noise added to the aux states, relative to their root mean square."""

    max_seq_len: Annotated[int, Field(ge=8)] | None = None
    """Longest sample in training; may only be smaller than `data.max_seq_len`."""

    batch_tokens: Annotated[int, Field(ge=8)] = 8192
    """Tokens (prompts included) packed into one forward pass."""

    accumulation: Positive = 1
    """Forward passes per optimizer step."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the products; master weights and optimizer states are float32. `auto`: bfloat16 on GPUs."""

    checkpoint_every_steps: Positive = 500
    """Optimizer steps between checkpoints; what a death costs at most."""

    keep_checkpoints: Positive = 2
    """Newest checkpoints kept."""

    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Seed of initial weights, order and noise."""

    threads: Positive | None = None
    """CPU threads of the training process; null = all cores. Part of what makes a digest reproducible."""


class Gate(Section):
    """What the drafter must reach; below it the verdict is `fail`."""

    min_mean: Annotated[FiniteFloat, Field(ge=1)] | None = None
    """Least pooled acceptance length."""

    min_ci_low: Annotated[FiniteFloat, Field(ge=1)] = 1.0
    """The lower end of the 95 % interval must lie above this."""

    min_macro: Annotated[FiniteFloat, Field(ge=1)] | None = None
    """Least mean over tasks."""

    min_task: Annotated[FiniteFloat, Field(ge=1)] | None = None
    """Least acceptance length of every task."""

    require_lossless: bool = True
    """Every answer must equal the verifier's own greedy answer (float32), or differ only at near-ties."""

    max_looping_share: Share | None = None
    """Largest share of answers that repeat an 8-gram; looping inflates acceptance."""


class Evaluation(Section):
    """How the drafter is measured: real drafting and verifying on held-out prompts."""

    prompts: Annotated[tuple[DatasetSpec, ...], Field(min_length=1)]
    """Held-out prompts; a line's `task` names its domain in the report."""

    max_prompts: Positive | None = None
    """At most this many, in order."""

    num_steps: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens drafted per verify call."""

    max_new_tokens: Annotated[int, Field(ge=2, le=131072)] = 256
    """Longest answer, in tokens."""

    unit_prompts: Positive = 64
    """Prompts of one unit of `evaluate`."""

    batch_size: Annotated[int, Field(ge=1, le=1024)] = 32
    """Prompts decoded side by side."""

    near_tie_logit_gap: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Largest gap between two logits that still counts as a tie when outputs part. null = 0 in float32, and two steps of
    the number format at logits of 16 to 32 in lower precision: 0.25 in bfloat16, 0.03125 in float16."""

    gate: Gate = Gate()


class StageResources(Section):
    """What one stage's units ask for."""

    threads: Positive | None = None
    """CPU threads of a unit. null = 1: more workers beside each other (`aerie up --workers`) use more cores better."""


class Resources(Section):
    """What the stages ask for; only what is named differs from the default."""

    generate: StageResources = StageResources()
    extract: StageResources = StageResources()
    evaluate: StageResources = StageResources()


class JobSpec(Section):
    """One job: from prompts to a measured, packaged drafter."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
    """Name of the drafter; unique among living jobs and finished drafters of a tenant."""

    verifier: VerifierSpec
    """The large model."""

    datasets: Annotated[tuple[DatasetSpec, ...], Field(min_length=1)]
    """Training data, one source or many, mixed by weight."""

    data: Data = Data()
    extraction: Extraction = Extraction()
    vocab: Vocab = Vocab()
    training: Training = Training()
    evaluation: Evaluation
    resources: Resources = Resources()
    metadata: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
        Field(max_length=16),
    ] = Field(default_factory=dict)
    """Up to 16 free key-value pairs, kept and shown, never interpreted."""

    @property
    def near_tie_logit_gap(self) -> float:
        """The gap that counts as a tie: the one asked for, or what the verifier's precision explains."""
        asked = self.evaluation.near_tie_logit_gap
        return NEAR_TIE_LOGIT_GAP[self.verifier.dtype] if asked is None else asked

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        if (cut := self.training.max_seq_len) is not None and cut > self.data.max_seq_len:
            raise ValueError("training.max_seq_len may only be smaller than data.max_seq_len")
        return self


def parse_job(document: Any) -> JobSpec:
    """`document` (decoded JSON) as a job. Raises InvalidRequest that names the first offending field and lists all."""
    from pydantic import ValidationError

    from eagle3_core.errors import InvalidRequest, json_pointer

    if (where := _no_text(document)) is not None:
        raise InvalidRequest(
            "a half of a surrogate pair is no text, and nothing that is stored or sent could hold it",
            remedy="send the document as UTF-8",
            pointer=json_pointer(where),
        )
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        faults = [{"pointer": json_pointer(e["loc"]), "detail": e["msg"]} for e in error.errors()]
        raise InvalidRequest(
            f"{faults[0]['pointer']}: {faults[0]['detail']}",
            remedy="docs/job.md and /openapi.json list the fields of a job",
            pointer=faults[0]["pointer"],
            faults=faults,
        ) from None


def _no_text(value: Any, place: tuple[str | int, ...] = ()) -> tuple[str | int, ...] | None:
    """Where `value` holds a string that UTF-8 cannot encode; None if nowhere. A key is named by what it lies in."""
    if isinstance(value, str):
        return place if any("\ud800" <= c <= "\udfff" for c in value) else None
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        document = cast("dict[Any, Any]", value)
        if any(_no_text(key) is not None for key in document):
            return place
        entries = document.items()
    elif isinstance(value, list):
        entries = enumerate(cast("list[Any]", value))
    return next((found for key, part in entries if (found := _no_text(part, (*place, key))) is not None), None)
