"""A verifier's folder: what can be wrong with it, and how its JSON files are read.

Every fault points at the job's field `/verifier/model` and says what to do, since whoever posts a job rarely made the
checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle3_core.errors import AerieError

POINTER = "/verifier/model"
MAX_JSON_BYTES = 256 << 20
"""Largest config, tokenizer or header that is read (the largest tokenizers in use have 35 MB)."""


class VerifierFault(AerieError):
    """The verifier's folder cannot be used."""

    code, status = "verifier.invalid", 422


class VerifierMissing(VerifierFault):
    """There is no checkpoint where the job says the verifier is."""

    code = "verifier.missing"


class VerifierConfig(VerifierFault):
    """The verifier's config.json is unreadable or lacks a field."""

    code = "verifier.config"


class VerifierTokenizer(VerifierFault):
    """The verifier has no usable tokenizer."""

    code = "verifier.tokenizer"


class VerifierTemplate(VerifierFault):
    """The verifier has no usable chat template."""

    code = "verifier.chat_template"


class VerifierWeights(VerifierFault):
    """The verifier's weights are missing, incomplete or pickled."""

    code = "verifier.weights"


class VerifierRemoteCode(VerifierFault):
    """The verifier needs Python code from its repository."""

    code = "verifier.remote_code"


class VerifierChanged(VerifierFault):
    """The verifier's folder holds another checkpoint than when the job was posted."""

    code, status = "verifier.changed", 409


def refusal(fault: type[VerifierFault], detail: str, remedy: str) -> VerifierFault:
    """A `fault` that points at the job's field."""
    return fault(detail, remedy=remedy, pointer=POINTER)


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")


def read_json(path: Path, fault: type[VerifierFault]) -> dict[str, Any]:
    """The JSON object in `path`. Raises `fault` that names the file."""
    remedy = "download the checkpoint again, or point verifier.model at another one"
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ValueError(f"{size} bytes are more than the {MAX_JSON_BYTES} that such a file may have")
        value = json.loads(path.read_bytes(), parse_constant=_no_number)
        json.dumps(value, ensure_ascii=False).encode()  # half surrogate pairs are no text
    except (OSError, ValueError, RecursionError) as error:
        raise refusal(fault, f"{path} cannot be read as JSON: {error}", remedy) from None
    if not isinstance(value, dict):
        raise refusal(fault, f"{path} holds a JSON {type(value).__name__}, not an object", remedy)
    return value


def read_json_if_there(path: Path, fault: type[VerifierFault]) -> dict[str, Any]:
    """The JSON object in `path`, empty where there is no such file. Raises `fault`."""
    return read_json(path, fault) if path.is_file() else {}
