"""A trained drafter as other programs load it: an SGLang directory and a speculators (vLLM) directory.

SGLang's loader drops tensor names that it does not know without a word, and reads a missing switch as "off"; a drafter
that was exported a little wrong serves with an acceptance length of 1. So every name is checked against the set the
loader accepts, and what was written is read back, from its files alone, and must give the trained drafter's logits.

Both are written in the verifier's precision, the one in which the drafter was measured.
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_core.drafter.build import speculators_module
from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.model import DraftCache, Drafter
from eagle3_core.drafter.tensors import LAYER, SGLANG_LAYER
from eagle3_core.drafter.verifier_parts import Teacher, VerifierParts
from eagle3_core.engine.config import SUPPORTED
from eagle3_core.errors import AerieError
from eagle3_core.verifier.layers import from_engine, sglang_engine, to_engine

SGLANG_NAMES = re.compile(
    r"fc\.weight|norm\.weight|lm_head\.weight|d2t|t2d|fc_norm\.[012]\.weight"
    r"|midlayer\.(input_layernorm|hidden_norm|post_attention_layernorm)\.weight"
    r"|midlayer\.self_attn\.(q|k|v|o)_proj\.weight|midlayer\.mlp\.(gate|up|down)_proj\.weight"
)
"""Names that `LlamaForCausalLMEagle3.load_weights` finds a place for, read in the supported versions; the embedding is taken from
the verifier."""

PROBE_TOKENS = 12
TOLERANCE = 1e-4
"""Largest difference of two logits, relative to the largest logit: both sides compute in float32."""


class ExportMismatch(AerieError):
    """An exported drafter, read back, is not the one that was trained."""

    code, status = "export.mismatch", 500


def sglang_config(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` of the SGLang directory: flat, with the layer numbers SGLang will read as ours."""
    engine = sglang_engine(config.verifier_model_type)
    rope = dict(config.rope_parameters)
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        **({"rope_scaling": scaling} if rope["rope_type"] != "default" else {}),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "num_aux_hidden_states": 3,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "norm_before_fc": False,
            "eagle_aux_hidden_state_layer_ids": list(to_engine(config.aux_layers, engine)),
        },
    }


def write_sglang(drafter: Drafter, folder: Path, dtype: torch.dtype) -> None:
    """Write `config.json` and `model.safetensors` for SGLang. Raises ExportMismatch, LayerChoice."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.replace(LAYER, SGLANG_LAYER): tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in drafter.state().items()
    }
    if unknown := [name for name in tensors if not SGLANG_NAMES.fullmatch(name)]:
        raise ExportMismatch(
            f"SGLang {', '.join(SUPPORTED)} would drop {', '.join(unknown)} without a word",
            remedy="this is a fault of the export: report it with the drafter's config",
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = sglang_config(drafter.config, dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def read_sglang(folder: Path, parts: VerifierParts) -> Drafter:
    """The drafter in an SGLang directory, in float32, from its files alone (and the verifier's embedding)."""
    stated: dict[str, Any] = json.loads((folder / "config.json").read_text())
    engine = sglang_engine(str(parts.text_config.get("outer_model_type") or parts.text_config.get("model_type", "")))
    ids = from_engine(tuple(stated["eagle_config"]["eagle_aux_hidden_state_layer_ids"]), engine)
    config = DrafterConfig(
        algorithm="eagle3.1" if stated["fc_norm"] and stated["norm_output"] else "eagle3",
        hidden_size=stated["hidden_size"],
        intermediate_size=stated["intermediate_size"],
        num_heads=stated["num_attention_heads"],
        num_kv_heads=stated["num_key_value_heads"],
        head_dim=stated["head_dim"],
        hidden_act=stated["hidden_act"],
        rms_norm_eps=stated["rms_norm_eps"],
        initializer_range=stated["initializer_range"],
        rope_parameters={"rope_type": "default", **stated.get("rope_scaling", {}), "rope_theta": stated["rope_theta"]},
        max_position_embeddings=stated["max_position_embeddings"],
        vocab_size=stated["vocab_size"],
        draft_vocab_size=stated["draft_vocab_size"],
        aux_layers=(ids[0], ids[1], ids[2]),
        ttt_steps=1,
        verifier_model_type="",
        verifier_architectures=(),
    )
    state = {name.replace(SGLANG_LAYER, LAYER): t for name, t in load_file(folder / "model.safetensors").items()}
    return Drafter.from_state(config, state, parts).at("cpu", torch.float32)


def write_speculators(drafter: Drafter, folder: Path, dtype: torch.dtype, verifier: str, teacher: Teacher) -> None:
    """Write a speculators checkpoint as its library saves it; `verifier` is the path or name it refers to.

    It repeats the verifier's embedding, as every checkpoint of that library does.
    """
    module = speculators_module(drafter.config, verifier, seed=0)
    named = dict(module.named_parameters())
    with torch.no_grad():
        for name, weight in drafter.weights.items():
            named[name].copy_(weight)
        named["embed_tokens.weight"].copy_(drafter.embedding_VH)
        named["verifier_lm_head.weight"].copy_(teacher.head_VdH)
        named["verifier_norm.weight"].copy_(teacher.norm_H)
    module.load_vocab_mappings(drafter.t2d_V, drafter.d2t_Vd)
    folder.mkdir(parents=True, exist_ok=True)
    module.to(dtype).save_pretrained(folder)


def load_speculators(folder: Path, verifier: Path) -> Any:
    """speculators' module from its own loader, in float32.

    Its config is the saved one; only the verifier's place is replaced, since a saved drafter may be read elsewhere.
    """
    from loguru import logger
    from speculators import SpeculatorModel, SpeculatorModelConfig

    logger.disable("speculators")  # it tells every file that it opens
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stated: Any = SpeculatorModelConfig.from_pretrained(str(folder))
        stated.transformer_layer_config._attn_implementation = "eager"
        stated.speculators_config.verifier.name_or_path = str(verifier)
        module: Any = SpeculatorModel.from_pretrained(str(folder), config=stated, dtype=torch.float32)
    return module.eval()


@torch.no_grad()
def speculators_logits(module: Any, steps: int, aux_T3H: Tensor, ids_T: Tensor) -> list[Tensor]:
    """[T, Vd] logits of each of `steps` steps, from speculators' own forward."""
    logits: list[Tensor] = []
    hook = module.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0].clone()))
    torch.compiler.set_stance("force_eager")
    try:
        module(
            hidden_states=aux_T3H[None], input_ids=ids_T[None], document_ids=torch.zeros_like(ids_T)[None], ttt_steps=steps
        )  # fmt: skip
    finally:
        torch.compiler.set_stance("default")
        hook.remove()
    return logits


def probe(drafter: Drafter) -> tuple[Tensor, Tensor]:
    """(aux states [T, 3H], token ids [T]) to compare drafters on; the same for the same drafter."""
    generator = torch.Generator().manual_seed(0)
    config = drafter.config
    aux_T3H = torch.randn(PROBE_TOKENS, 3 * config.hidden_size, generator=generator)
    return aux_T3H, torch.randint(0, config.vocab_size, (PROBE_TOKENS,), generator=generator)


@torch.no_grad()
def prefill_logits(drafter: Drafter, aux_T3H: Tensor, ids_T: Tensor) -> Tensor:
    """[T, Vd] logits of step 0 for pairs (ids, aux) at positions 1..T, through the decoding path."""
    cache = DraftCache.allocate(drafter, 1, len(ids_T))
    positions = torch.arange(1, len(ids_T) + 1)[None]
    return drafter.logits(drafter.layer(ids_T[None], drafter.combine(aux_T3H[None]), positions, cache))[0]


def require_same(drafter: Drafter, dtype: torch.dtype, sglang: Path, speculators: Path, parts: VerifierParts) -> None:
    """Read both directories back and compare them with `drafter` as rounded to `dtype`. Raises ExportMismatch.

    Tensors must be equal bit for bit; the logits then show whether the config says how to use them.
    """
    rounded = drafter.at("cpu", dtype).at("cpu", torch.float32)
    inputs = probe(drafter)
    served = read_sglang(sglang, parts)
    if served.config.aux_layers != drafter.config.aux_layers:
        raise ExportMismatch(
            f"SGLang will read the inputs of layers {served.config.aux_layers}, the drafter was trained on "
            f"{drafter.config.aux_layers}",
            remedy="this is a fault of the export: report it with the verifier's config",
        )
    _require_context("sglang", served.config.max_position_embeddings, drafter)
    _require_equal("sglang", {**served.state(), "frequencies": served.rope.inverse_frequencies}, rounded)
    _require_close("sglang", prefill_logits(served, *inputs), prefill_logits(rounded, *inputs))

    module = load_speculators(speculators, parts.folder)
    _require_context("speculators", module.config.transformer_layer_config.max_position_embeddings, drafter)
    state: dict[str, Tensor] = {n: t for n, t in module.state_dict().items() if n in rounded.state()}
    if drafter.config.draft_vocab_size == drafter.config.vocab_size:  # the library keeps no mapping of all tokens
        state |= {"d2t": drafter.d2t_Vd, "t2d": drafter.t2d_V}
    _require_equal("speculators", {**state, "frequencies": module.rotary_emb.inv_freq}, rounded)
    rounded = replace(rounded, embedding_VH=rounded.embedding_VH.to(dtype))  # it repeats the embedding, rounded
    first = speculators_logits(module, 1, *inputs)[0]  # the library's forward stumbles over more steps than tokens
    _require_close("speculators", first, prefill_logits(rounded, *inputs))


def _require_context(name: str, have: int, drafter: Drafter) -> None:
    """An engine cuts the drafter's context there; no logit of a short probe shows it."""
    if have != (want := drafter.config.max_position_embeddings):
        raise ExportMismatch(
            f"{name}/ says a context of {have} tokens, the trained drafter has {want}",
            remedy="package the drafter again; if it stays, report the drafter's config",
        )


def _require_equal(name: str, have: dict[str, Tensor], drafter: Drafter) -> None:
    want = {**drafter.state(), "frequencies": drafter.rope.inverse_frequencies}
    wrong = sorted(n for n in want if n not in have or not torch.equal(have[n].float(), want[n].float()))
    if wrong or have.keys() - want.keys():
        raise ExportMismatch(
            f"{name}/ differs from the trained drafter in {', '.join(wrong or sorted(have.keys() - want.keys()))}",
            remedy="package the drafter again; if it stays, report the drafter's config",
        )


def _require_close(name: str, have: Tensor, want: Tensor) -> None:
    gap = float((have - want).abs().max() / want.abs().max().clamp_min(1e-30))
    if have.shape != want.shape or not gap <= TOLERANCE:
        raise ExportMismatch(
            f"the drafter in {name}/ gives other logits than the trained one: {gap:.2e} apart, {TOLERANCE:.0e} allowed",
            remedy="package the drafter again; if it stays, report the drafter's config",
        )
