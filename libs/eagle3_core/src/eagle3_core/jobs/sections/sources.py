"""What a job starts from: the verifier, the data, and how data becomes samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, field_validator, model_validator

from eagle3_core.jobs.sections.base import Positive, Section, Share, inconsistent


class EngineTuning(Section):
    """How much the engine takes and does at a time. null leaves a number to the engine, which knows its GPU."""

    memory_fraction: Annotated[FiniteFloat, Field(gt=0, lt=1)] | None = None
    """Share of a GPU's memory for weights and KV cache."""

    kv_cache_tokens: Positive | None = None
    """Tokens that the KV cache holds."""

    chunked_prefill_tokens: Positive | None = None
    """Longest piece of a prompt that is computed in one pass."""

    max_running_requests: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Requests that are decoded side by side."""

    in_flight: Annotated[int, Field(ge=1, le=4096)] = 256
    """Most requests sent at a time. Fewer are, while more would not be faster."""


class VerifierSpec(Section):
    """The large model whose tokens are drafted."""

    model: Annotated[str, Field(min_length=1, max_length=4096)]
    """Folder of a Hugging Face checkpoint (config, tokenizer with chat template, safetensors), under a root that the
    operator lists: an absolute path or `file:` URI. In a document that the command reads also relative to that document."""

    revision: Annotated[str, Field(max_length=256)] = "local"
    """Revision of the checkpoint; part of the capture contract."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision in which the verifier runs. Losslessness is exact only in float32."""

    backend: Literal["transformers", "sglang"] = "transformers"
    """Engine that generates, captures and serves for the measurement. `sglang` needs a worker that has SGLang."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; `auto` takes a GPU where there is one."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s?#@]+$", max_length=2048)] | None = None
    """Address of a running SGLang server with this verifier, which then writes the answers; the operator lists those
    that may be named. null = each worker starts a server of its own. States are always captured by a worker's own."""

    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs over which a worker's own server splits the verifier."""

    engine: EngineTuning = EngineTuning()

    @model_validator(mode="after")
    def _engine_of_its_own(self) -> VerifierSpec:
        if self.backend != "sglang":
            settings = {"endpoint": None, "tensor_parallel": 1, "engine": EngineTuning()}
            if odd := [name for name, default in settings.items() if getattr(self, name) != default]:
                raise inconsistent(
                    f"verifier.{odd[0]} is for backend sglang, and verifier.backend is {self.backend}", odd[0],
                    remedy=f"leave verifier.{odd[0]} out, or set verifier.backend to sglang",
                )  # fmt: skip
        return self


class DatasetSpec(Section):
    """One source of prompts or conversations."""

    uri: Annotated[str, Field(min_length=1, max_length=4096)]
    """JSONL file under a root that the operator lists: an absolute path or `file:` URI. In a document that the command
    reads also relative to that document."""

    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompts"] = "auto"
    """Shape of a line; `auto` decides by the first line's fields."""

    weight: Annotated[FiniteFloat, Field(ge=1e-6, le=1e6)] = 1.0
    """Share of this source among all, relative to the other weights, when `max_samples` of the mix binds."""

    max_samples: Positive | None = None
    """At most this many samples of this source, in file order."""


class Regenerate(Section):
    """The verifier writes the answers itself: the largest single lever on acceptance (SpecForge v0.3 release notes)."""

    enabled: bool = True
    """Replace the last assistant turn (or answer the last user turn) by the verifier's own answer."""

    max_new_tokens: Annotated[int, Field(ge=1, le=131072)] = 1024
    """Longest answer, in tokens; a longer one is cut and used as it is."""

    batch_size: Annotated[int, Field(ge=1, le=4096)] = 64
    """Answers decoded side by side, with backend transformers; SGLang makes its own batches."""

    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] = 0.0
    """0 = the verifier's greedy answer. Above it answers are sampled, as it is served: with backend sglang only."""

    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that together have this probability; 1 = from all. Only above temperature 0."""


class Data(Section):
    """How sources become samples."""

    max_samples: Positive | None = None
    """At most this many samples over all sources, drawn by their weights."""

    max_seq_len: Annotated[int, Field(ge=8, le=1048576)] = 4096
    """Longest sample in tokens; longer conversations are cut at the end, prompts that leave no room are dropped."""

    template_arguments: Annotated[
        dict[
            Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")],
            bool | int | Annotated[str, Field(max_length=256)],
        ],
        Field(max_length=16),
    ] = Field(default_factory=dict)
    """What the chat template is asked with besides the messages: the mode that will be served, `{"enable_thinking": false}` for
    one (`chat_template_kwargs` of a served request). It holds for training and held-out prompts alike."""

    val_ratio: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.05
    """Share of the samples held back to watch the training loss."""

    bad_rows_limit: Share = 0.01
    """Share of unusable lines (broken JSON, wrong roles, nothing to train on) above which the job is refused."""

    unit_samples: Positive = 256
    """Samples of one unit of `generate` and `extract`: what one worker leases and a death costs."""

    regenerate: Regenerate = Regenerate()

    @field_validator("template_arguments")
    @classmethod
    def _not_the_messages(cls, arguments: dict[str, bool | int | str]) -> dict[str, bool | int | str]:
        if taken := sorted(arguments.keys() & {"messages", "tools", "documents", "add_generation_prompt"}):
            raise inconsistent(
                f"{taken[0]} is not for a job to say: conversations and stages decide it", taken[0],
                remedy=f"leave {taken[0]} out of data.template_arguments",
            )  # fmt: skip
        return arguments
