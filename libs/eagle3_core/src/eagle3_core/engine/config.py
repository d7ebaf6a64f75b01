"""One typed configuration of an SGLang server, and the engine's own arguments, made here and nowhere else.

The configuration says what the house means: layers by their inputs, capture on or off, a drafter. The engine's numbering
of layers and the names of its switches do not leave this module.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eagle3_core.verifier.layers import sglang_engine, to_engine

CAPTURE_VARIABLE = "AERIE_CAPTURE"
"""Environment variable by which a server's processes learn their `CaptureConfig`, as JSON; unset or empty = capture off."""
TRAFFIC_VARIABLE = "AERIE_TRAFFIC"
"""Environment variable with the `TrafficConfig`, as JSON; unset or empty = nothing of what people ask is kept."""
SUPPORTED = ("0.5.23",)
"""Versions of SGLang on which the tests of capture ran. The flag for auxiliary states is new in this one."""

SPARE_TOKENS = 7
"""Positions (and tokens of the KV cache) that SGLang 0.5.23 keeps free: a prompt has fewer by this (`tp_worker.py`)."""


class EngineConfig(BaseModel):
    """A part of a server's configuration: frozen, and closed to unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class CaptureConfig(EngineConfig):
    """How a server captures hidden states."""

    sink: Annotated[str, Field(min_length=1, max_length=4096)]
    """Where states go: `file:///folder` or `s3://bucket/prefix?endpoint=https://host` (credentials from the environment)."""

    aux_layers: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
    """The three layer *inputs* that the engine must capture (Hugging Face's `hidden_states[i]`), strictly increasing."""

    final: Literal["pre", "post"] = "pre"
    """Whether the final state is taken before or after the final norm. Only `pre` allows both: a norm cannot be undone."""

    queue_bytes: Annotated[int, Field(ge=1)] = 2 << 30
    """States that may wait in main memory for the sink. A fuller queue holds prefill back."""

    writers: Annotated[int, Field(ge=1, le=64)] = 2
    """Threads that write to the sink."""

    stall_s: Annotated[float, Field(gt=0)] = 120.0
    """Longest time that prefill is held back, in seconds. After that the server stops, with the reason."""

    receipt_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest time that an answer waits for its states to lie safely in the sink, in seconds."""


class TrafficConfig(EngineConfig):
    """Which real chats a server keeps as training samples. Whoever sets it answers for the consent of those who chat."""

    sink: Annotated[str, Field(min_length=1, max_length=4096)]
    """Where samples go: `file:///folder` or `s3://bucket/prefix?endpoint=https://host` (credentials from the environment)."""

    share: Annotated[float, Field(gt=0, le=1)]
    """Share of the chats that is kept, drawn at random."""

    per_minute: Annotated[int, Field(ge=1, le=100_000)] = 60
    """Most chats that one answering process keeps in a minute."""

    retention_days: Annotated[int, Field(ge=1, le=3650)] = 30
    """Days after which samples are deleted."""

    redact: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")] | None = None
    """The operator's own function `module:function`: takes a sample ({"id", "task", "messages"}) and returns what may be
    kept of it, or None. It runs before anything is written; where it fails, the sample is not kept."""


class Drafter(EngineConfig):
    """A drafter that serves with the verifier."""

    model: Path
    """Folder of the drafter in SGLang's format."""
    num_steps: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens drafted per verify call, in one chain."""


class ServerConfig(EngineConfig):
    """One SGLang server."""

    model: Path
    """Folder of the verifier's checkpoint."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: Literal["cuda", "cpu"] = "cuda"
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of a GPU's memory for weights and KV cache; None leaves it to the engine."""
    chunked_prefill_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest piece of a prompt that is computed in one pass; None leaves it to the engine."""
    max_running_requests: Annotated[int, Field(ge=1)] | None = None
    max_total_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens that the KV cache holds; None leaves it to the engine."""
    radix_cache: bool = True
    overlap: bool = True
    """Schedule the next pass while the last one runs."""
    capture: CaptureConfig | None = None
    """Capture hidden states; off by default."""
    drafter: Drafter | None = None
    """Decode speculatively."""
    traffic: TrafficConfig | None = None
    """Keep a share of the real chats as training samples; off by default."""
    engine_args: tuple[str, ...] = ()
    """Further arguments of SGLang, as they are."""
    python: Path = Path(sys.executable)
    """Interpreter of the environment that holds SGLang and this package."""
    start_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest time until the server serves, in seconds."""

    @model_validator(mode="after")
    def _one_purpose(self) -> ServerConfig:
        if self.capture is not None and self.drafter is not None:
            raise ValueError("a server captures or drafts: states are captured by prefill, which no drafter speeds up")
        return self


def arguments(config: ServerConfig, port: int) -> list[str]:
    """SGLang's command line for `config`. Raises LayerChoice where the engine cannot be told to read the layers."""
    args = [
        "--model-path", str(config.model), "--host", config.host, "--port", str(port), "--dtype", config.dtype,
        "--device", config.device, "--tp-size", str(config.tensor_parallel), "--sleep-on-idle",
    ]  # fmt: skip
    for name, value in (
        ("--mem-fraction-static", config.memory_fraction),
        ("--chunked-prefill-size", config.chunked_prefill_tokens),
        ("--max-running-requests", config.max_running_requests),
        ("--max-total-tokens", config.max_total_tokens),
    ):
        args += [] if value is None else [name, str(value)]
    args += [] if config.radix_cache else ["--disable-radix-cache"]
    args += [] if config.overlap else ["--disable-overlap-schedule"]
    if config.capture is not None:
        ids = to_engine(config.capture.aux_layers, sglang_engine(_model_type(config.model)))
        args += ["--speculative-algorithm", "EAGLE3", "--enable-return-aux-hidden-states"]
        args += ["--return-aux-hidden-state-layer-ids", *map(str, ids)]
        args += ["--disable-prefill-cuda-graph"]  # a GPU's default: its replay calls none of the hooks that capture
    if config.drafter is not None:
        steps = config.drafter.num_steps
        args += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(config.drafter.model)]
        args += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"]
        args += ["--speculative-num-draft-tokens", str(steps + 1)]
    return [*args, *config.engine_args]


def _model_type(model: Path) -> str:
    return str(json.loads((model / "config.json").read_bytes()).get("model_type", ""))
