"""What a drafter is, as data: its shapes, its RoPE and its two norms, derived from the verifier's `config.json`.

The file is read as plain JSON, never through code that a checkpoint brings along, and nested `text_config`s are
followed. Only what SGLang can serve is built: one Llama layer, no `norm_before_residual`, full attention.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.errors import AerieError

FORMAT_VERSION = 1
STATIC_ROPES = ("default", "linear", "llama3", "yarn")
MLA_HEAD_DIM = 128

_ROPE_SPELLINGS = {"mrope": "default"}
_PLAIN_HEADS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0, "embedding_multiplier": 1.0}
_SHIFTED_NORMS = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_text", "recurrent_gemma")


class UnsupportedVerifier(AerieError):
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
    """The language model's part of `verifier/config.json`. Raises UnsupportedVerifier where there is none."""
    path = verifier / "config.json"
    try:
        document = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UnsupportedVerifier(
            f"{path} cannot be read as JSON: {error}", remedy="point verifier.model at a Hugging Face checkpoint folder"
        ) from None
    nested = (document.get(key) for key in ("text_config", "llm_config", "language_config"))
    text = next((value for value in nested if isinstance(value, dict)), None)
    if text is not None:
        inherited = {
            k: document[k] for k in ("architectures", "tie_word_embeddings") if k in document and k not in text
        }
        return {**text, **inherited, "outer_model_type": document.get("model_type", "")}
    return document


def drafter_config(
    verifier: dict[str, Any],
    *,
    algorithm: Literal["eagle3.1", "eagle3"],
    aux_layers: tuple[int, int, int],
    draft_vocab_size: int,
    ttt_steps: int,
) -> DrafterConfig:
    """The drafter for a verifier with text config `verifier`. Raises UnsupportedVerifier."""
    _require_plain_head(verifier)
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    if missing := [name for name in needed if verifier.get(name) is None]:
        raise UnsupportedVerifier(
            f"the verifier's config names no {', '.join(missing)}",
            remedy="use a decoder-only language model with a Hugging Face config",
        )
    heads, kv_heads, head_dim = _attention_shape(verifier)
    return DrafterConfig(
        algorithm=algorithm,
        hidden_size=verifier["hidden_size"],
        intermediate_size=verifier["intermediate_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=verifier.get("hidden_act") or verifier.get("hidden_activation") or "silu",
        rms_norm_eps=float(verifier.get("rms_norm_eps", 1e-6)),
        initializer_range=float(verifier.get("initializer_range", 0.02)),
        rope_parameters=_rope(verifier),
        max_position_embeddings=verifier["max_position_embeddings"],
        vocab_size=verifier["vocab_size"],
        draft_vocab_size=draft_vocab_size,
        aux_layers=aux_layers,
        ttt_steps=ttt_steps,
        verifier_model_type=str(verifier.get("outer_model_type") or verifier.get("model_type", "")),
        verifier_architectures=tuple(verifier.get("architectures") or ()),
    )


def _require_plain_head(verifier: dict[str, Any]) -> None:
    """The teacher is softmax(head(norm(state))): refuse verifiers whose own head does more than that."""
    odd = {k: verifier[k] for k, plain in _PLAIN_HEADS.items() if verifier.get(k) not in (None, plain)}
    if verifier.get("model_type") in _SHIFTED_NORMS:
        odd["model_type"] = verifier["model_type"]
    if odd:
        raise UnsupportedVerifier(
            f"the verifier's head or final norm is not a plain one: {odd}",
            remedy="use a verifier with an RMS final norm (gain w) and an unscaled linear head, as Llama, Qwen, "
            "DeepSeek and Kimi have",
        )


def _attention_shape(verifier: dict[str, Any]) -> tuple[int, int, int]:
    """(query heads, key-value heads, head size) of the drafter's layer.

    The verifier's own; verifiers with latent attention (`kv_lora_rank`) have none that a Llama layer could take over,
    their drafters get plain heads of 128 as many as the verifier has.
    """
    heads = int(verifier["num_attention_heads"])
    if verifier.get("kv_lora_rank"):
        return heads, heads, MLA_HEAD_DIM
    kv_heads = int(verifier.get("num_key_value_heads") or heads)
    head_dim = int(verifier.get("head_dim") or verifier["hidden_size"] // heads)
    if heads % kv_heads or head_dim % 2:
        raise UnsupportedVerifier(
            f"{heads} query heads over {kv_heads} key-value heads of size {head_dim} make no grouped attention",
            remedy="use a verifier whose query heads are a multiple of its key-value heads, with an even head size",
        )
    return heads, kv_heads, head_dim


def _rope(verifier: dict[str, Any]) -> dict[str, Any]:
    """The verifier's RoPE in the newer one-dict spelling. Latent attention keeps its base, not its scaling."""
    rope = dict(verifier.get("rope_parameters") or verifier.get("rope_scaling") or {})
    if "rope_theta" not in rope and isinstance(rope.get("full_attention"), dict):
        rope = dict(rope["full_attention"])
    theta = rope.get("rope_theta", verifier.get("rope_theta", 10000.0))
    kind = str(rope.get("rope_type", rope.pop("type", "default")))
    kind = _ROPE_SPELLINGS.get(kind, kind)
    if verifier.get("kv_lora_rank") or kind == "default":
        return {"rope_type": "default", "rope_theta": float(theta)}
    if kind not in STATIC_ROPES:
        raise UnsupportedVerifier(
            f"RoPE of type {kind!r} changes with the length of the context; drafters support {', '.join(STATIC_ROPES)}",
            remedy="use a checkpoint with a static RoPE scaling",
        )
    if kind in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", verifier["max_position_embeddings"])
    rope.pop("type", None)
    return {**rope, "rope_type": kind, "rope_theta": float(theta)}
