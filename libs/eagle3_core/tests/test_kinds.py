"""The lists of model types are held against transformers and against what the engine says of a tiny model of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3_core.drafter.config import Undraftable, drafter_config, read_text_config
from eagle3_core.errors import AerieError
from eagle3_core.jobs.spec import VerifierSpec
from eagle3_core.testing import tiny_verifier
from eagle3_core.verifier import kinds
from eagle3_core.verifier.agreement import WHOLE_LAYERS, check_agreement, is_tied
from eagle3_core.verifier.folder import UnsupportedVerifier, read_json, text_config
from eagle3_core.verifier.identity import inspect
from eagle3_core.verifier.weights import fingerprint

TEXT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": 320, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 2,
}  # fmt: skip
"""Sizes that no two of are the same by chance: heads x head_dim is not the hidden size."""
MOE: dict[str, Any] = {
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "shared_expert_intermediate_size": 16,
}  # fmt: skip
MLA: dict[str, Any] = MOE | {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4,
    "num_key_value_heads": 4, "head_dim": None,
}  # fmt: skip
ALSO: dict[str, dict[str, Any]] = {
    "deepseek_v2": MLA, "deepseek_v3": MLA, "ernie4_5_moe": MOE | {"moe_num_experts": 4, "moe_k": 2}, "glm4_moe": MOE,
    "gpt_oss": MOE, "granitemoe": MOE, "hunyuan_v1_moe": MOE | {"moe_topk": 2}, "mixtral": MOE, "olmoe": MOE | {"head_dim": 8},
    "phimoe": MOE, "qwen2_moe": MOE, "qwen3_moe": MOE, "llama4_text": MOE | {"intermediate_size_mlp": 48},
    "jamba": MOE | {"mamba_d_state": 8, "mamba_dt_rank": 4}, "minimax": MOE | {"block_size": 16, "head_dim": 8},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_ssm": 64},
    "qwen3_next": MOE | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                         "linear_value_head_dim": 8},
    "gemma2": {"query_pre_attn_scalar": 8}, "gemma3_text": {"query_pre_attn_scalar": 8}, "falcon": {"head_dim": None},
    **{kind: {"head_dim": 8} for kind in ("olmo", "phi", "stablelm", "starcoder2", "cohere", "cohere2", "olmo2", "olmo3",
                                          "phi3", "qwen2", "lfm2", "helium")},
}  # fmt: skip
"""What else a type needs to be small, or cannot have."""

PROVEN = sorted(
    kinds.PLAIN_ATTENTION | {"deepseek_v2", "deepseek_v3", "helium", "phi3"} | set(kinds.REFUSED)
    - {"dbrx", "gemma3", "llama4", "qwen3_5", "qwen3_5_text", "recurrent_gemma"}  # their parts, or too large by default
)  # fmt: skip


@pytest.mark.slow
def test_transformers_knows_every_type_as_a_language_model_and_no_other():
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    assert {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES} == kinds.KNOWN_TYPES


def saved(kind: str, folder: Path, **fields: Any) -> Path:
    """A tiny random model of `kind`, saved as transformers saves it, with a tokenizer and a template beside it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny_verifier(folder)
    torch.manual_seed(0)
    sizes = {name: value for name, value in (TEXT | ALSO.get(kind, {}) | fields).items() if value is not None}
    config = AutoConfig.for_model(kind, **sizes)
    AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PROVEN)
def test_a_type_is_refused_by_name_if_and_only_if_the_engine_or_the_drafter_would_refuse_it(
    kind, tmp_path, monkeypatch
):
    from eagle3_core.drafter.verifier_parts import VerifierParts
    from eagle3_core.verifier.transformers import TransformersVerifier

    folder = saved(kind, tmp_path / kind)
    if kind in kinds.REFUSED:
        with pytest.raises(UnsupportedVerifier):
            inspect(folder)
        monkeypatch.setattr("eagle3_core.verifier.identity.REFUSED", {})
        monkeypatch.setattr("eagle3_core.drafter.config.REFUSED", {})
        monkeypatch.setattr("eagle3_core.verifier.identity.check_agreement", lambda *_: None)

    def could_be_served() -> None:
        TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype="float32", device="cpu"), (1, 2, 3))
        drafter_config(
            read_text_config(folder), algorithm="eagle3.1", aux_layers=(1, 2, 3), draft_vocab_size=9, ttt_steps=1
        )
        parts = VerifierParts(folder)
        assert parts.embedding().shape == parts.head().shape == (320, 32)
        assert parts.norm().shape == (32,)

    if kind in kinds.REFUSED:
        with pytest.raises(AerieError) as caught:
            could_be_served()
        assert isinstance(caught.value, UnsupportedVerifier | Undraftable) or caught.value.code == "verifier.self_check"
    else:
        could_be_served()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "fields"),
    [("llama", {"attention_bias": True}), ("llama", {"mlp_bias": True}), ("llama", {"tie_word_embeddings": True}),
     ("qwen3", {"attention_bias": True}), *((kind, {"head_dim": 8}) for kind in sorted(WHOLE_LAYERS))],
)  # fmt: skip
def test_a_layer_is_whole_as_transformers_saves_it_with_every_switch(kind, fields, tmp_path):
    folder = saved(kind, tmp_path / kind, **fields)
    text, weights = text_config(read_json(folder / "config.json", UnsupportedVerifier)), fingerprint(folder)

    check_agreement(text, weights)

    assert is_tied(text, weights) == bool(fields.get("tie_word_embeddings"))
