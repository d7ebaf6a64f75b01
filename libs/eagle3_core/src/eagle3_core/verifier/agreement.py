"""Whether a checkpoint's config and its weights are of one model: sizes against shapes, layer by layer.

A folder that was put together from two releases, cut short, or edited by hand loads with random tensors, or dies after
minutes; its headers tell within milliseconds. Every refusal names what config.json says, what the weights say, and what to
do. Nothing is assumed of tensors whose names are not known, so packed and unusual layers pass and are left to the engine.

Shapes: H hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from eagle3_core.verifier.folder import (
    UnsupportedVerifier,
    VerifierMismatch,
    VerifierWeights,
    flag_in,
    refusal,
    size_in,
)
from eagle3_core.verifier.kinds import KNOWN_LAYER_TYPES, LLAMA_SHAPED, PLAIN_ATTENTION
from eagle3_core.verifier.weights import Weights

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
PLAIN = frozenset({"BF16", "F16", "F32", "F64"})
"""Element types of weights, as the safetensors format names them, that are the numbers the model computes with."""
ONE_MODEL = "put config.json and all weight files of one and the same release of the model together"

LLAMA_LAYER = frozenset({
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
    "self_attn.v_proj.weight", "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
    "mlp.down_proj.weight",
})  # fmt: skip
"""Tensors of a Llama decoder layer. The drafter's layer can be a copy of one that has these and no others."""

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
WHOLE_LAYERS: dict[str, frozenset[str]] = {
    "llama": frozenset(),
    "mistral": frozenset(),
    "qwen2": frozenset(f"{part}.bias" for part in ATTENTION[:3]),
    "qwen3": frozenset({"self_attn.q_norm.weight", "self_attn.k_norm.weight"}),
}
"""What a layer of these types has besides a Llama layer's tensors; with the biases that are switched on, that is all."""
BIAS_SWITCHES = {"attention_bias": ("llama", "qwen3"), "mlp_bias": ("llama",)}
"""The types that heed each switch."""


def is_tied(config: Mapping[str, Any], weights: Weights) -> bool:
    """Whether the output head is the embedding, by the outer config where one is nested in another, as transformers ties.

    Raises VerifierMismatch where config and weights cannot both be right.
    """
    tied, head, embedding = flag_in(dict(config), "tie_word_embeddings"), weights.find(HEAD), weights.find(EMBEDDING)
    if tied is False and head is None:
        _differ("tie_word_embeddings=false", f"hold no tensor ending with {HEAD}, so there is no output head")
    if tied and head and embedding and not weights.equal(head, embedding):
        _differ("tie_word_embeddings=true", f"hold a {head} that is not {embedding}")
    return head is None or bool(tied)


def check_agreement(text: Mapping[str, Any], weights: Weights) -> None:
    """Hold the language model's config `text` against `weights`.

    Raises VerifierMismatch where they contradict each other, VerifierWeights where a tensor is missing.
    """
    embedding = weights.find(EMBEDDING)
    if embedding is None:
        raise refusal(
            VerifierWeights,
            f"the weights hold no tensor ending with {EMBEDDING}",
            "use a decoder-only verifier whose embedding bears that name, as Llama's, Qwen's and DeepSeek's do",
        )
    prefix = embedding.removesuffix(EMBEDDING)
    hidden, vocab = size_in(dict(text), "hidden_size"), size_in(dict(text), "vocab_size")
    _check_shape(weights, embedding, (vocab, hidden), f"vocab_size={vocab} and hidden_size={hidden}")
    if (head := weights.find(HEAD)) is not None:
        _check_shape(weights, head, (vocab, hidden), f"vocab_size={vocab} and hidden_size={hidden}")
    norm = prefix + "norm.weight"
    if norm not in weights.tensors:
        raise refusal(
            VerifierWeights, f"the weights hold no {norm}, the final norm", "use a verifier with an RMS final norm"
        )
    _check_shape(weights, norm, (hidden,), f"hidden_size={hidden}")
    _check_kept_as_numbers(weights, prefix)
    check_layer_types(text)
    (mark, layers), count = _layers(weights, prefix), size_in(dict(text), "num_hidden_layers")
    _check_count(text, layers, mark)
    _check_complete(text, layers, count)
    projections = list(_projections(text))
    for layer in range(count):
        for name, shape, said in projections:
            if name in layers[layer]:
                _check_shape(weights, f"{mark}{layer}.{name}", shape, said)


def _check_kept_as_numbers(weights: Weights, prefix: str) -> None:
    """Raise UnsupportedVerifier for weights that are no plain floating point: loaded without their scales they are noise."""
    for name, place in weights.tensors.items():
        if name.endswith(".weight") and (name.startswith(prefix) or name.endswith(HEAD)) and place.dtype not in PLAIN:
            raise refusal(
                UnsupportedVerifier,
                f"{place.path.name} holds {name} as {place.dtype}, and config.json names no quantisation; read are "
                f"{', '.join(sorted(PLAIN))}",
                "use the model's release in bfloat16 or float16",
            )


def check_layer_types(text: Mapping[str, Any]) -> None:
    """Raise UnsupportedVerifier for kinds of layers that no engine here computes, VerifierMismatch for a wrong number."""
    stated, count = text.get("layer_types"), size_in(dict(text), "num_hidden_layers")
    if stated is None:
        return
    kinds: list[Any] = stated if isinstance(stated, list) else [stated]
    if odd := sorted({str(kind)[:80] for kind in kinds if kind not in list(KNOWN_LAYER_TYPES)}):
        raise refusal(
            UnsupportedVerifier,
            f"config.json says layer_types with {', '.join(odd[:4])}; captured are {', '.join(sorted(KNOWN_LAYER_TYPES))}",
            "use a verifier with softmax attention in every layer",
        )
    if len(kinds) != count:
        raise refusal(
            VerifierMismatch, f"config.json says num_hidden_layers={count} and {len(kinds)} layer_types", ONE_MODEL
        )


def layer_tensors(weights: Weights, layer: int) -> frozenset[str]:
    """Names of a decoder layer's tensors, from the layer on (`self_attn.q_proj.weight`)."""
    prefix = (weights.find(EMBEDDING) or "").removesuffix(EMBEDDING)
    return _layers(weights, prefix)[1].get(layer, frozenset())


def _layers(weights: Weights, prefix: str) -> tuple[str, dict[int, frozenset[str]]]:
    """What layers are called (up to their number), and the tensor names of every layer, by its number."""
    for mark in (f"{prefix}layers.", f"{prefix}blocks."):  # transformers 5.19 saves Kimi-K2.5's layers as blocks
        found: dict[int, set[str]] = {}
        for name in weights.tensors:
            number, dot, rest = name.removeprefix(mark).partition(".") if name.startswith(mark) else ("", "", "")
            if dot and number.isascii() and number.isdigit() and len(number) < 6 and str(int(number)) == number:
                found.setdefault(int(number), set()).add(rest)
        if found:
            return mark, {number: frozenset(names) for number, names in found.items()}
    return f"{prefix}layers.", {}


def _check_count(text: Mapping[str, Any], layers: Mapping[int, frozenset[str]], mark: str) -> None:
    """Layers 0..L-1 are there, and nothing behind them but the layers that predict further tokens (DeepSeek-V3)."""
    said = size_in(dict(text), "num_hidden_layers")
    if (missing := next((i for i in range(said) if i not in layers), None)) is not None:
        _differ(f"num_hidden_layers={said}", f"hold nothing of {mark}{missing}")
    extra = text.get("num_nextn_predict_layers")
    extra = extra if isinstance(extra, int) and not isinstance(extra, bool) else 0
    if (last := max(layers)) >= said + max(0, extra):
        _differ(
            f"num_hidden_layers={said}",
            f"hold {mark}{last} too: a model cut short answers, but worthlessly",
        )


def _check_complete(text: Mapping[str, Any], layers: Mapping[int, frozenset[str]], count: int) -> None:
    """No layer lacks what another one has besides, and where the type's tensors are known, all are there and no others."""
    kinds: dict[frozenset[str], int] = {}
    for layer in range(count):
        kinds.setdefault(layers[layer], layer)
    for names, layer in kinds.items():
        for fuller, other in kinds.items():
            if names < fuller:
                _lacks(layer, fuller - names, f"layer {other} has it")
    expected = _expected(text)
    for names, layer in kinds.items() if expected else ():
        said = f"model_type={text.get('model_type')!r}"
        if lack := expected - names:
            _lacks(layer, lack, f"config.json says {said}, whose layers have it")
        if odd := sorted(name for name in names - expected if not name.endswith("inv_freq")):
            _differ(said, f"hold {odd[0]} in layer {layer}, which such a layer has no place for")


def _expected(text: Mapping[str, Any]) -> frozenset[str]:
    """The tensors of every layer of this type, as its config switches biases on; empty where they are not known."""
    kind = str(text.get("model_type"))
    if kind not in WHOLE_LAYERS:
        return frozenset()
    names = LLAMA_LAYER | WHOLE_LAYERS[kind]
    for flag, parts in (("attention_bias", ATTENTION), ("mlp_bias", MLP)):
        if kind in BIAS_SWITCHES[flag] and flag_in(dict(text), flag):
            names |= {f"{part}.bias" for part in parts}
    return names


def _lacks(layer: int, names: frozenset[str], why: str) -> NoReturn:
    raise refusal(
        VerifierWeights,
        f"the weights lack {min(names)} of layer {layer} ({len(names)} tensors are missing there), and {why}",
        "download the checkpoint again; a random tensor would make every state worthless",
    )


def _projections(text: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name in a layer, shape, what config.json says of it) of every projection whose shape the config gives."""
    kind, config = text.get("model_type"), dict(text)
    if kind not in PLAIN_ATTENTION:
        return
    hidden, heads = size_in(config, "hidden_size"), size_in(config, "num_attention_heads")
    # Without head_dim the type's own default holds, which is hidden_size / heads only for some.
    head_dim = size_in(config, "head_dim", hidden // heads if kind in ("llama", "mistral", "qwen2") else 0)
    kv_heads = size_in(config, "num_key_value_heads", heads if kind == "llama" else 0)
    if head_dim:
        said = f"hidden_size={hidden}, num_attention_heads={heads}, head_dim={head_dim}"
        yield "self_attn.q_proj.weight", (heads * head_dim, hidden), said
        yield "self_attn.o_proj.weight", (hidden, heads * head_dim), said
    if head_dim and kv_heads:
        said = f"hidden_size={hidden}, num_key_value_heads={kv_heads}, head_dim={head_dim}"
        yield "self_attn.k_proj.weight", (kv_heads * head_dim, hidden), said
        yield "self_attn.v_proj.weight", (kv_heads * head_dim, hidden), said
    if kind in LLAMA_SHAPED:
        inner = size_in(config, "intermediate_size")
        said = f"hidden_size={hidden}, intermediate_size={inner}"
        yield "mlp.gate_proj.weight", (inner, hidden), said
        yield "mlp.up_proj.weight", (inner, hidden), said
        yield "mlp.down_proj.weight", (hidden, inner), said
        yield "input_layernorm.weight", (hidden,), f"hidden_size={hidden}"
        yield "post_attention_layernorm.weight", (hidden,), f"hidden_size={hidden}"


def _check_shape(weights: Weights, name: str, shape: tuple[int, ...], said: str) -> None:
    if (have := weights.tensors[name].shape) != shape:
        _differ(said, f"hold {name} in shape {list(have)} instead of {list(shape)}")


def _differ(config: str, weights: str) -> NoReturn:
    raise refusal(VerifierMismatch, f"config.json says {config}, but the weights {weights}", ONE_MODEL)
