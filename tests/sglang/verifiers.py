"""Tiny random verifiers of DeepSeek's architecture: latent attention, experts, YaRN, and the other rule of layer numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from eagle3_core.testing import tiny_verifier

ENGINE_FIELDS = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1}
"""What SGLang reads from such a config and transformers does not write."""
YARN = {
    "rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0,
}  # fmt: skip


def tiny_deepseek(folder: Path) -> Path:
    """Write a random checkpoint of 8 layers (float32) into `folder` and return it."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=64, vocab_size=320, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=128, moe_intermediate_size=32, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        first_k_dense_replace=1, n_group=1, topk_group=1, max_position_embeddings=4096, rope_parameters=YARN,
        routed_scaling_factor=1.0, bos_token_id=1, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).float().eval().save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    rope = {name: value for name, value in YARN.items() if name != "rope_theta"}
    written |= {**ENGINE_FIELDS, "rope_scaling": rope, "rope_theta": YARN["rope_theta"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(written))
    words = tiny_verifier(folder / "words")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(words / name, folder / name)
    shutil.rmtree(words)
    return folder


def tiny_kimi(folder: Path, language: Path) -> Path:
    """Write Kimi K2.5's wrapper around the checkpoint `language` of `tiny_deepseek` into `folder` and return it.

    Its vision tower is as small as can be and stays as the engine makes it: these tests ask about texts.
    """
    shutil.copytree(language, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    text = json.loads((language / "config.json").read_text())
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    written = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "float32",
        "text_config": text, "vision_config": {**vision, "vt_hidden_size": 32, "text_hidden_size": text["hidden_size"]},
        "bos_token_id": text["bos_token_id"], "eos_token_id": text["eos_token_id"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(written))
    tensors = {f"language_model.{name}": value for name, value in load_file(language / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
