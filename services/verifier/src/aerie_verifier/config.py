"""What the plug-in is told, through one environment variable that the launcher writes: unset means off.

An engine starts several processes by spawning; the environment is the one thing that all of them inherit, and the
engine's own command line stays the engine's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3_core.errors import AerieError

VARIABLE = "AERIE_CAPTURE"
"""Environment variable with the JSON of a `CaptureConfig`; unset or empty = capture off."""
RECEIPTS_VARIABLE = "AERIE_CAPTURE_RECEIPTS"
"""Environment variable with the path of the socket on which receipts come back; set by the server's first process."""
SUPPORTED = ("0.5.23",)
"""Versions of SGLang on which the tests of this package ran. The flag for auxiliary states is new in this one."""


class CaptureMisconfigured(AerieError):
    """The capture plug-in cannot work as it is configured, or not with this engine."""

    code, status = "capture.config", 500


class CaptureConfig(BaseModel):
    """How a server captures hidden states."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

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


def read_config(environment: Mapping[str, str] = os.environ) -> CaptureConfig | None:
    """The configuration in `environment`; None where capture is off. Raises CaptureMisconfigured."""
    text = environment.get(VARIABLE, "")
    if not text:
        return None
    try:
        config = CaptureConfig.model_validate_json(text)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise CaptureMisconfigured(
            f"{VARIABLE} does not validate: {faults}",
            remedy="start the server with aerie-verifier, which writes it, or unset it to turn capture off",
        ) from None
    if list(config.aux_layers) != sorted(set(config.aux_layers)):
        raise CaptureMisconfigured(
            f"aux_layers {list(config.aux_layers)} are not strictly increasing",
            remedy="name three different layers, the lowest first",
        )
    return config
