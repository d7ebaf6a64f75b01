"""What is known of model types by name: which run without a repository's own code, and which this house cannot serve.

A drafter is trained on head(norm(state)) with a final RMS norm whose gain is w, and captured from layers of softmax
attention. A type that computes anything else would only be found out once the verifier is loaded (`probe` proves each of
these), or worse, never; so what is known is refused by its name. A slow test builds a tiny model of every type here and
holds both lists against what the engine then says.
"""

from __future__ import annotations

KNOWN_TYPES = frozenset({
    "afmoe", "apertus", "arcee", "aria", "aria_text", "axk1", "axk2", "aya_vision", "bamba", "bart", "bert",
    "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "bitnet", "blenderbot", "blenderbot-small", "blip",
    "blip-2", "bloom", "blt", "camembert", "chameleon", "codegen", "cohere", "cohere2", "cohere2_moe",
    "cohere2_vision", "cohere_compass", "cohere_compass_text", "cosmos3_edge", "cosmos3_omni", "cpmant", "ctrl",
    "cwm", "data2vec-text", "dbrx", "deepseek_ocr2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4",
    "deepseek_vl", "deepseek_vl_hybrid", "diffllama", "diffusion_gemma", "doge", "dots1", "electra", "emu3",
    "ernie", "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe", "evolla", "exaone4", "exaone4_5", "exaone_moe",
    "falcon", "falcon_h1", "falcon_mamba", "fast_vlm", "flex_olmo", "florence2", "fuyu", "gemma", "gemma2",
    "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_assistant", "gemma4_text",
    "gemma4_unified", "gemma4_unified_assistant", "gemma4_unified_text", "git", "glm", "glm4", "glm46v", "glm4_moe",
    "glm4_moe_lite", "glm4v", "glm4v_moe", "glm5_next", "glm_moe_dsa", "glm_ocr", "glmga", "got_ocr2", "gpt-sw3",
    "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite",
    "granite4_vision", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl", "hy_v3", "hy_v4", "hyperclovax",
    "hyperclovax_vision_v2", "idefics", "idefics2", "idefics3", "inkling_mm_model", "inkling_text", "instructblip",
    "instructblipvideo", "internvl", "jais2", "jamba", "janus", "jetmoe", "kimi_k25", "kimi_linear", "kosmos-2",
    "kosmos-2.5", "laguna", "lfm2", "lfm2_moe", "lfm2_vl", "lighton_ocr", "llama", "llama4", "llama4_text", "llava",
    "llava_next", "llava_next_video", "llava_onevision", "longcat_flash", "mamba", "mamba2", "marian", "mbart",
    "megatron-bert", "mellum", "mimo_v2_flash", "minicpm3", "minicpmv4_6", "minicpmv4_7", "minimax", "minimax_m2",
    "minimax_m3_vl", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mistral3", "mistral4", "mixtral",
    "mllama", "modernbert-decoder", "moshi", "mpt", "muse_glimmer", "musicgen", "musicgen_melody", "mvp",
    "nanochat", "nemotron", "nemotron_h", "nemotron_h_omni", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe",
    "openai-gpt", "opt", "ovis2", "paddleocr_vl", "paligemma", "pegasus", "perception_lm", "persimmon", "phi",
    "phi3", "phi4_multimodal", "phimoe", "pi0", "pix2struct", "plbart", "pp_chart2table", "pp_formulanet",
    "prophetnet", "qianfan_ocr", "qwen2", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3",
    "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next",
    "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "rwkv", "seed_oss",
    "shieldgemma2", "smollm3", "smolvlm", "solar_open", "stablelm", "starcoder2", "step3p7", "t5gemma2", "trocr",
    "udop", "vaultgemma", "video_llama_3", "video_llava", "vipllava", "vision-encoder-decoder", "whisper", "xglm",
    "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xlstm", "xmod", "youtu", "zamba", "zamba2", "zaya",
})  # fmt: skip
"""Model types that the pinned transformers builds as a language model without a repository's own code (a test compares)."""

_NO_SOFTMAX = "has layers without softmax attention (state space, convolution or linear attention)"
_LAYER_NORM = "ends in a layer norm, which takes the mean away or adds a bias"
_SHIFTED_GAIN = "ends in a norm whose gain is 1 + w"

REFUSED = {
    **dict.fromkeys(("bamba", "falcon_h1", "jamba", "lfm2", "minimax", "qwen3_next"), _NO_SOFTMAX),
    **dict.fromkeys(
        ("cohere", "cohere2", "falcon", "nemotron", "phi", "phimoe", "stablelm", "starcoder2"), _LAYER_NORM
    ),
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_text", "recurrent_gemma"), _SHIFTED_GAIN
    ),
    **dict.fromkeys(("llama4", "llama4_text"), "has layers of chunked attention"),
    "dbrx": "ends in a layer norm and keeps its sizes under other names",
    "gpt_oss": "has attention sinks",
    "olmo": "ends in a norm without a gain",
}
"""Why no drafter can be made for a verifier of this type, as the end of a sentence."""

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers (`layer_types` of a config) that the engine computes."""

LLAMA_SHAPED = frozenset({
    "ernie4_5", "granite", "llama", "ministral", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3",
})  # fmt: skip
"""Types whose every layer has the tensors of a Llama layer at least, each in the shape that config.json's sizes give."""

PLAIN_ATTENTION = LLAMA_SHAPED | {
    "ernie4_5_moe", "exaone4", "glm", "glm4", "glm4_moe", "granitemoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "mixtral",
    "olmo2", "olmo3", "olmoe", "qwen2_moe", "qwen3_moe",
}  # fmt: skip
"""Types whose q, k, v and o projections have the shapes that config.json's sizes give."""
