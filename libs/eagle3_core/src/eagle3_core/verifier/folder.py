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
MAX_JSON_BYTES = 100_000_000
"""Largest config, tokenizer or header that is read: the safetensors format's own bound (tokenizers in use have up to 35 MB)."""
MAX_COUNT = 1 << 31
"""Sizes of a model lie below this: what libraries keep in 32 bits."""
MAX_NUMBER = 1e38
"""Numbers of a config lie below this: what float32 holds."""


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


class VerifierMismatch(VerifierFault):
    """The verifier's config, tokenizer and weights are not those of one model."""

    code = "verifier.mismatch"


class VerifierRemoteCode(VerifierFault):
    """The verifier needs Python code from its repository."""

    code = "verifier.remote_code"


class UnsupportedVerifier(VerifierFault):
    """This engine cannot run the verifier faithfully."""

    code = "verifier.unsupported"


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
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise refusal(fault, f"{path} cannot be read as JSON: {error or type(error).__name__}", remedy) from None
    if not isinstance(value, dict):
        raise refusal(fault, f"{path} holds a JSON {type(value).__name__}, not an object", remedy)
    return value


def read_json_if_there(path: Path, fault: type[VerifierFault]) -> dict[str, Any]:
    """The JSON object in `path`, empty where there is no such file. Raises `fault`."""
    return read_json(path, fault) if path.is_file() else {}


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json: vision-language and Kimi-K2.5 configs nest it under `text_config`."""
    for key in ("text_config", "llm_config", "language_config"):
        nested = config.get(key)
        if isinstance(nested, dict):
            return {str(name): value for name, value in nested.items()}
    return config


def size_in(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """The size that `config` has under `key`; `default` where it has none. Raises VerifierConfig for what is no size."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < MAX_COUNT:
        raise refusal(
            VerifierConfig,
            f"the verifier's config says {key}={value!r:.200}, a positive whole number is needed",
            "use a decoder-only language model whose config.json (or its text_config) names its sizes",
        )
    return value


def number_in(config: dict[str, Any], key: str, default: float) -> float:
    """The positive number that `config` has under `key`; `default` where it has none. Raises VerifierConfig."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_NUMBER:
        raise refusal(
            VerifierConfig,
            f"the verifier's config says {key}={value!r:.200}, a positive number is needed",
            "repair config.json, or download it again",
        )
    return float(value)


def flag_in(config: dict[str, Any], key: str) -> bool | None:
    """The switch that `config` has under `key`; None where it has none. Raises VerifierConfig."""
    value = config.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise refusal(
        VerifierConfig,
        f"the verifier's config says {key}={value!r:.200}, true or false is needed",
        "repair config.json, or download it again",
    )
