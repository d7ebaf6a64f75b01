"""The capture contract: what must be the same wherever hidden states and drafters meet.

Recorded when states are captured, carried in every shard manifest and in the drafter's package, compared by every
reader. A mismatch is an error that names both sides, before any compute is spent. What may differ without making states
of another verifier (the engine, how it is spread over devices) is said, so that a person who wonders can see it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict

from eagle3_core.errors import AerieError

SCHEMA_VERSION = 1


class ContractMismatch(AerieError):
    """Two parts that must share one capture contract do not."""

    code, status = "contract.mismatch", 409


class CaptureContract(BaseModel):
    """How hidden states were captured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    verifier: str
    """Identity digest of the verifier: config, tokenizer, template, weights fingerprint."""
    verifier_name: str
    revision: str
    config_digest: str
    tokenizer_digest: str
    chat_template_digest: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    aux_layers: tuple[int, int, int]
    """Layer *inputs*: input of layer i = Hugging Face `hidden_states[i]`."""
    final: Literal["pre", "post"] = "pre"
    """Whether `final` is taken before or after the final norm."""
    dtype: str
    """Precision of the run."""
    stored_dtype: str
    """Precision of the stored states."""
    quantization: str | None = None
    kv_cache_dtype: str
    attention: str
    parallel: str = "tp1"
    engine: str
    engine_version: str
    plugin_version: str | None = None
    """Of the plug-in that captured inside the engine; None where the engine runs in our own process."""
    capture_pass: Literal["decode", "prefill"]
    mask_rule: str = "assistant tokens and the end-of-turn token"


MUST_MATCH = (
    "verifier", "revision", "config_digest", "tokenizer_digest", "chat_template_digest", "hidden_size", "num_layers",
    "vocab_size", "aux_layers", "final", "dtype", "stored_dtype", "quantization", "kv_cache_dtype", "mask_rule",
)  # fmt: skip
"""Fields that two contracts must share for one drafter: another precision is, to a drafter, another verifier."""
MAY_DIFFER = ("engine", "engine_version", "plugin_version", "attention", "parallel", "capture_pass")
"""Fields that round differently and mean the same: a difference is a warning."""


def agree(sides: Iterable[tuple[str, CaptureContract]]) -> CaptureContract:
    """The contract that all `sides` (name, contract) share. Raises ContractMismatch that names field and both sides."""
    named = list(sides)
    first_name, first = named[0]
    for name, other in named[1:]:
        for field in MUST_MATCH:
            if getattr(first, field) != getattr(other, field):
                raise ContractMismatch(
                    f"{first_name} has {field}={getattr(first, field)!r}, {name} has {field}={getattr(other, field)!r}",
                    remedy=f"capture the states again with one {field}, or use the verifier they came from",
                    field=field,
                )
    return first


def differences(sides: Iterable[tuple[str, CaptureContract]]) -> list[str]:
    """How `sides` (name, contract) that agree differ nevertheless, a sentence for every field of MAY_DIFFER.

    A side that has no value there (an engine without a plug-in) differs in nothing: that it is another engine is said.
    """
    named, found = list(sides), list[str]()
    for field in MAY_DIFFER:
        first_with: dict[str, str] = {}
        for name, contract in named:
            if (value := getattr(contract, field)) is not None:
                first_with.setdefault(str(value), name)
        if len(first_with) > 1:
            stated = ", ".join(f"{value} ({name})" for value, name in first_with.items())
            found.append(f"the hidden states differ in {field}: {stated}")
    return found
