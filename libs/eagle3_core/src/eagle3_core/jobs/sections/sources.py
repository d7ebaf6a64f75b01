"""What a job starts from: the verifier, the data, and how data becomes samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, field_validator, model_validator

from eagle3_core import patterns
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


class ServerAddress(Section):
    """A server that somebody else runs."""

    url: Annotated[str, Field(pattern=patterns.SERVER_ADDRESS, max_length=2048)]
    """Its address, `https://host:port`, as the operator lists it in `AERIE_ENDPOINTS`: no other is ever asked, and
    no redirect is followed."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name under which it serves the verifier. null = the one model that it lists, if that is named like the verifier's folder."""

    key: Annotated[str, Field(pattern=patterns.KEY_NAME)] | None = None
    """Name of the key that opens it, among those that the operator gives in `AERIE_ENDPOINT_KEYS`. The key itself is never
    part of a job. null = it needs none."""

    timeout_s: Annotated[FiniteFloat, Field(gt=0, le=86400)] = 3600.0
    """Longest time that one answer may take, in seconds: one of 32k tokens at 10 tokens a second, by default."""

    in_flight: Annotated[int, Field(ge=1, le=4096)] = 256
    """Most requests sent at a time. Fewer are, while more would not be faster, or while it turns some away."""


class Endpoint(ServerAddress):
    """A running server with this verifier, which writes the answers."""

    api: Literal["sglang", "openai"] = "sglang"
    """What it speaks: SGLang's own `/generate`, or `/v1/completions` and `/v1/chat/completions` as vLLM, SGLang and others do
    (`url` with or without the `/v1`)."""

    retokenize: bool = False
    """For servers that do not say which tokens they sampled (`return_token_ids`): make tokens of the text of each answer, and
    keep those answers alone whose tokens give the same text again and are as many as the server counted. The
    others are left out and counted; more than `data.bad_rows_limit` of them end the unit. false = such servers are refused."""


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

    endpoint: Endpoint | None = None
    """A running server with this verifier, which then writes the answers, with either backend. null = the backend writes
    them. States come from the backend, or from `extraction.endpoint`."""

    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs over which a worker's own server splits the verifier."""

    engine: EngineTuning = EngineTuning()

    @model_validator(mode="after")
    def _engine_of_its_own(self) -> VerifierSpec:
        if self.backend != "sglang":
            settings = {"tensor_parallel": 1, "engine": EngineTuning()}
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
    """0 = the verifier's greedy answer. Above it answers are sampled, as it is served: by SGLang or by `verifier.endpoint`."""

    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that together have this probability; 1 = from all. Only above temperature 0."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Draw sampled answers from seeds that are made of this one and of each prompt. Only above temperature 0 and with
    `verifier.endpoint`, which must show that it honours seeds (SGLang does with `--enable-deterministic-inference`)."""

    ask: Literal["tokens", "messages"] = "tokens"
    """What `verifier.endpoint` is sent: a prompt's token ids, or its messages together with `data.template_arguments`, for
    servers that take nothing else. Their template must make the very same prompt."""


class Data(Section):
    """How sources become samples."""

    max_samples: Positive | None = None
    """At most this many samples over all sources, drawn by their weights."""

    max_seq_len: Annotated[int, Field(ge=8, le=1048576)] = 4096
    """Longest sample in tokens; longer conversations are cut at the end, prompts that leave no room are dropped."""

    template_arguments: Annotated[
        dict[
            Annotated[str, Field(pattern=patterns.ARGUMENT_NAME)],
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
