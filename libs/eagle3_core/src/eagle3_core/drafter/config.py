"""What a drafter is, as data: its shapes, its RoPE and its two norms, derived from the verifier's `config.json`.

The file is read as plain JSON, never through code that a checkpoint brings along, and nested `text_config`s are
followed. Only what SGLang can serve is built: one Llama layer, no `norm_before_residual`, full attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.errors import AerieError
from eagle3_core.verifier.folder import (
    MAX_NUMBER,
    POINTER,
    VerifierConfig,
    number_in,
    read_json,
    refusal,
    size_in,
    text_config,
)
from eagle3_core.verifier.kinds import REFUSED

FORMAT_VERSION = 1
STATIC_ROPES = ("default", "linear", "llama3", "yarn")
MLA_HEAD_DIM = 128

_ROPE_SPELLINGS = {"mrope": "default"}
_SCALINGS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
"""Numbers that a kind of scaling cannot do without."""
_ROPE_NUMBERS = frozenset({
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor",
})  # fmt: skip
_PLAIN_HEADS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0, "embedding_multiplier": 1.0}
HIDDEN_ACTS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
"""Activations that the drafter's layer can have (`drafter.model.ACTIVATIONS`)."""


class Undraftable(AerieError):
    """No drafter can be built for this verifier."""

    code, status = "drafter.verifier", 422


class DrafterConfig(BaseModel):
    """Shapes and switches of one drafter; written to `drafter.json` and part of its digest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = FORMAT_VERSION
    algorithm: Literal["eagle3.1", "eagle3"]
    hidden_size: int
    """H, the verifier's."""
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    initializer_range: float
    rope_parameters: dict[str, Any]
    """As in a Hugging Face config: `rope_type`, `rope_theta` and the scaling's own fields."""
    max_position_embeddings: int
    """Longest context in tokens that the RoPE is set up for: the verifier's, so that serving never clamps."""
    vocab_size: int
    """V, rows of the verifier's embedding."""
    draft_vocab_size: int
    """Vd, tokens the drafter can propose."""
    aux_layers: tuple[int, int, int]
    """Verifier layers whose *inputs* the drafter reads."""
    ttt_steps: int = Field(ge=1)
    verifier_model_type: str
    verifier_architectures: tuple[str, ...]

    @property
    def fc_norm(self) -> bool:
        """EAGLE-3.1: each aux state has its own RMS norm before `fc`."""
        return self.algorithm == "eagle3.1"

    @property
    def norm_output(self) -> bool:
        """EAGLE-3.1: the state that is fed back is the normed one."""
        return self.algorithm == "eagle3.1"


def read_text_config(verifier: Path) -> dict[str, Any]:
    """The language model's part of `verifier/config.json`, with what it inherits. Raises VerifierConfig where there is none."""
    document = read_json(verifier / "config.json", VerifierConfig)
    if (text := text_config(document)) is document:
        return document
    inherited = {k: document[k] for k in ("architectures", "tie_word_embeddings") if k in document}
    return {**text, **inherited, "outer_model_type": document.get("model_type", "")}


def drafter_config(
    verifier: dict[str, Any],
    *,
    algorithm: Literal["eagle3.1", "eagle3"],
    aux_layers: tuple[int, int, int],
    draft_vocab_size: int,
    ttt_steps: int,
) -> DrafterConfig:
    """The drafter for a verifier with text config `verifier`. Raises Undraftable, VerifierConfig."""
    _require_plain_head(verifier)
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    if missing := [name for name in needed if verifier.get(name) is None]:
        raise Undraftable(
            f"the verifier's config names no {', '.join(missing)}",
            remedy="use a decoder-only language model with a Hugging Face config",
            pointer=POINTER,
        )
    heads, kv_heads, head_dim = _attention_shape(verifier)
    named = verifier.get("architectures")
    return DrafterConfig(
        algorithm=algorithm,
        hidden_size=size_in(verifier, "hidden_size"),
        intermediate_size=size_in(verifier, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=_activation(verifier),
        rms_norm_eps=number_in(verifier, "rms_norm_eps", 1e-6),
        initializer_range=number_in(verifier, "initializer_range", 0.02),
        rope_parameters=_rope(verifier),
        max_position_embeddings=size_in(verifier, "max_position_embeddings"),
        vocab_size=size_in(verifier, "vocab_size"),
        draft_vocab_size=draft_vocab_size,
        aux_layers=aux_layers,
        ttt_steps=ttt_steps,
        verifier_model_type=str(verifier.get("outer_model_type") or verifier.get("model_type", "")),
        verifier_architectures=tuple(map(str, named)) if isinstance(named, list) else (),
    )


def _require_plain_head(verifier: dict[str, Any]) -> None:
    """The teacher is softmax(head(norm(state))): refuse verifiers whose own head does more than that."""
    odd = {
        k: verifier[k] for k, plain in _PLAIN_HEADS.items() if verifier.get(k) is not None and verifier[k] is not plain
        and (isinstance(verifier[k], bool) or verifier[k] != plain)
    }  # fmt: skip
    kind = verifier.get("model_type")
    if isinstance(kind, str) and kind in REFUSED:
        odd["model_type"] = kind
    if odd:
        raise Undraftable(
            f"the verifier's head or final norm is not a plain one: {odd}",
            remedy="use a verifier with an RMS final norm (gain w) and an unscaled linear head, as Llama, Qwen, "
            "DeepSeek and Kimi have",
            pointer=POINTER,
        )


def _activation(verifier: dict[str, Any]) -> str:
    """The verifier's activation, under either of its names."""
    stated = verifier.get("hidden_act", "silu") or verifier.get("hidden_activation")
    if stated not in HIDDEN_ACTS:
        raise Undraftable(
            f"the verifier's config says hidden_act={stated!r:.80}, a drafter's layer can have {', '.join(HIDDEN_ACTS)}",
            remedy="use a verifier with one of these activations",
            pointer=POINTER,
        )
    return str(stated)


def _attention_shape(verifier: dict[str, Any]) -> tuple[int, int, int]:
    """(query heads, key-value heads, head size) of the drafter's layer.

    The verifier's own; verifiers with latent attention (`kv_lora_rank`) have none that a Llama layer could take over,
    their drafters get plain heads of 128 as many as the verifier has.
    """
    heads = size_in(verifier, "num_attention_heads")
    if verifier.get("kv_lora_rank") is not None and size_in(verifier, "kv_lora_rank"):
        return heads, heads, MLA_HEAD_DIM
    kv_heads = size_in(verifier, "num_key_value_heads", heads)
    head_dim = size_in(verifier, "head_dim", max(1, size_in(verifier, "hidden_size") // heads))
    if heads % kv_heads or head_dim % 2:
        raise Undraftable(
            f"{heads} query heads over {kv_heads} key-value heads of size {head_dim} make no grouped attention",
            remedy="use a verifier whose query heads are a multiple of its key-value heads, with an even head size",
            pointer=POINTER,
        )
    return heads, kv_heads, head_dim


def _rope(verifier: dict[str, Any]) -> dict[str, Any]:
    """The verifier's RoPE in the newer one-dict spelling. Latent attention keeps its base, not its scaling."""
    stated = verifier.get("rope_parameters") or verifier.get("rope_scaling") or {}
    if isinstance(stated, dict) and "rope_theta" not in stated and isinstance(stated.get("full_attention"), dict):
        stated = stated["full_attention"]
    if not isinstance(stated, dict):
        raise _odd_rope(f"{stated!r:.200}, an object is needed")
    rope = {str(name): value for name, value in stated.items()}
    theta = number_in({"rope_theta": rope.get("rope_theta", verifier.get("rope_theta"))}, "rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.pop("type", "default"))
    kind = _ROPE_SPELLINGS.get(str(kind), str(kind))
    if verifier.get("kv_lora_rank") or kind == "default":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in STATIC_ROPES:
        raise Undraftable(
            f"RoPE of type {kind!r:.80} changes with the length of the context; drafters support {', '.join(STATIC_ROPES)}",
            remedy="use a checkpoint with a static RoPE scaling",
            pointer=POINTER,
        )
    if kind in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", verifier["max_position_embeddings"])
    rope.pop("type", None)
    _check_scaling(kind, rope)
    return {**rope, "rope_type": kind, "rope_theta": theta}


def _check_scaling(kind: str, rope: dict[str, Any]) -> None:
    """Raise VerifierConfig unless a scaled RoPE has the numbers that its kind computes with."""
    if missing := [name for name in _SCALINGS[kind] if rope.get(name) is None]:
        raise _odd_rope(f"rope_type={kind} without {', '.join(missing)}")
    for name in _ROPE_NUMBERS & rope.keys():
        value = rope[name]
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_NUMBER
        ):
            raise _odd_rope(f"{name}={value!r:.80}, a number is needed")
    if any(rope[name] == 0 for name in _SCALINGS[kind]):
        raise _odd_rope(f"rope_type={kind} with a factor of 0")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise _odd_rope("a low_freq_factor that is not below high_freq_factor")


def _odd_rope(what: str) -> AerieError:
    detail = f"the verifier's config says of its RoPE: {what}"
    return refusal(
        VerifierConfig, detail, "repair rope_parameters (or rope_scaling) in config.json, or download it again"
    )
