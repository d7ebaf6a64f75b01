"""What a job starts from: the verifier, the data, and how data becomes samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from eagle3_core.jobs.sections.base import Positive, Section, Share


class VerifierSpec(Section):
    """The large model whose tokens are drafted."""

    model: Annotated[str, Field(min_length=1, max_length=4096)]
    """Folder of a Hugging Face checkpoint (config, tokenizer with chat template, safetensors), under a root that the
    operator lists: an absolute path or `file:` URI. In a document that the command reads also relative to that document."""

    revision: Annotated[str, Field(max_length=256)] = "local"
    """Revision of the checkpoint; part of the capture contract."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision in which the verifier runs. Losslessness is exact only in float32."""

    backend: Literal["transformers"] = "transformers"
    """Engine that generates and captures."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; `auto` takes a GPU where there is one."""


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
