"""What the plug-in is told, through one environment variable that the launcher writes: unset means off.

An engine starts several processes by spawning; the environment is the one thing that all of them inherit, and the
engine's own command line stays the engine's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from pydantic import ValidationError

from eagle3_core.engine.config import CAPTURE_VARIABLE, CaptureConfig
from eagle3_core.errors import AerieError
from eagle3_core.faults import placed

RECEIPTS_VARIABLE = "AERIE_CAPTURE_RECEIPTS"
"""Environment variable with the path of the socket on which receipts come back; set by the server's first process."""


class CaptureMisconfigured(AerieError):
    """The capture plug-in cannot work as it is configured, or not with this engine."""

    code, status = "capture.config", 500


def read_config(environment: Mapping[str, str] = os.environ) -> CaptureConfig | None:
    """The configuration in `environment`; None where capture is off. Raises CaptureMisconfigured."""
    text = environment.get(CAPTURE_VARIABLE, "")
    if not text:
        return None
    try:
        config = CaptureConfig.model_validate_json(text)
    except ValidationError as error:
        faults = "; ".join(placed(fault, CaptureConfig) for fault in error.errors())
        raise CaptureMisconfigured(
            f"{CAPTURE_VARIABLE} does not validate: {faults}",
            remedy="start the server with aerie-verifier, which writes it, or unset it to turn capture off",
        ) from None
    if list(config.aux_layers) != sorted(set(config.aux_layers)):
        raise CaptureMisconfigured(
            f"aux_layers {list(config.aux_layers)} are not strictly increasing",
            remedy="name three different layers, the lowest first",
        )
    return config
