"""Which fields of a verifier's config.json cannot be null, by its model type.

Many fields may be null. Where transformers declares one that may not, it refuses the whole config, but only when the model is
loaded; so such a null is refused when the job is posted. A field that a type does not have may hold
anything, so the lists are by type; of types that are not here, transformers' own words come later. A test compares.
"""

EVERY_TYPE = frozenset({
    "hidden_act", "hidden_size", "initializer_range", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "rms_norm_eps", "tie_word_embeddings", "vocab_size",
})  # fmt: skip
"""Of each type below."""
MORE: dict[str, frozenset[str]] = {
    "deepseek_v2": frozenset({
        "attention_bias", "first_k_dense_replace", "kv_lora_rank", "mlp_bias", "moe_intermediate_size",
        "n_routed_experts", "n_shared_experts", "output_router_logits", "qk_nope_head_dim", "qk_rope_head_dim",
        "routed_scaling_factor", "use_cache", "v_head_dim",
    }),
    "deepseek_v3": frozenset({
        "attention_bias", "kv_lora_rank", "moe_intermediate_size", "n_routed_experts", "n_shared_experts",
        "num_mtp_layers", "output_router_logits", "qk_nope_head_dim", "qk_rope_head_dim", "routed_scaling_factor",
        "use_cache",
    }),
    "ernie4_5": frozenset(),
    "ernie4_5_moe": frozenset({"moe_intermediate_size", "use_cache"}),
    "exaone4": frozenset({"attention_dropout", "num_key_value_heads", "use_cache"}),
    "glm": frozenset({"attention_bias", "use_cache"}),
    "glm4": frozenset({"attention_bias", "attention_dropout", "head_dim", "num_key_value_heads", "use_cache"}),
    "glm4_moe": frozenset({
        "attention_bias", "attention_dropout", "first_k_dense_replace", "moe_intermediate_size", "n_group",
        "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "num_key_value_heads",
        "num_mtp_layers", "output_router_logits", "routed_scaling_factor", "topk_group", "use_cache", "use_qk_norm",
    }),
    "granite": frozenset({
        "attention_bias", "attention_dropout", "attention_multiplier", "embedding_multiplier", "logits_scaling",
        "mlp_bias", "residual_multiplier", "use_cache",
    }),
    "granitemoe": frozenset({"attention_bias", "use_cache"}),
    "hunyuan_v1_dense": frozenset({"attention_bias", "attention_dropout", "pretraining_tp", "use_cache"}),
    "hunyuan_v1_moe": frozenset({
        "attention_bias", "attention_dropout", "moe_topk", "num_experts", "output_router_logits", "pretraining_tp",
        "use_cache",
    }),
    "llama": frozenset({"attention_bias", "mlp_bias", "use_cache"}),
    "ministral": frozenset({"attention_dropout", "num_key_value_heads", "use_cache"}),
    "mistral": frozenset({"attention_dropout", "num_key_value_heads", "use_cache"}),
    "mixtral": frozenset({
        "attention_dropout", "num_experts_per_tok", "num_key_value_heads", "num_local_experts",
        "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "use_cache",
    }),
    "olmo2": frozenset({"attention_bias", "attention_dropout", "use_cache"}),
    "olmo3": frozenset({"attention_bias", "attention_dropout", "use_cache"}),
    "olmoe": frozenset({
        "attention_bias", "attention_dropout", "norm_topk_prob", "num_experts", "num_experts_per_tok",
        "output_router_logits", "router_aux_loss_coef", "use_cache",
    }),
    "phi3": frozenset({
        "attention_dropout", "embd_pdrop", "original_max_position_embeddings", "resid_pdrop", "use_cache",
    }),
    "qwen2": frozenset({"attention_dropout", "max_window_layers", "use_cache", "use_sliding_window"}),
    "qwen2_moe": frozenset({
        "attention_dropout", "decoder_sparse_step", "max_window_layers", "moe_intermediate_size", "norm_topk_prob",
        "num_experts", "num_experts_per_tok", "output_router_logits", "qkv_bias", "router_aux_loss_coef",
        "shared_expert_intermediate_size", "use_cache", "use_sliding_window",
    }),
    "qwen3": frozenset({
        "attention_bias", "attention_dropout", "head_dim", "max_window_layers", "use_cache", "use_sliding_window",
    }),
    "qwen3_moe": frozenset({
        "attention_bias", "attention_dropout", "decoder_sparse_step", "moe_intermediate_size", "norm_topk_prob",
        "num_experts", "num_experts_per_tok", "num_key_value_heads", "output_router_logits", "router_aux_loss_coef",
        "use_cache", "use_sliding_window",
    }),
    "seed_oss": frozenset({
        "attention_bias", "attention_dropout", "attention_out_bias", "mlp_bias", "pretraining_tp", "residual_dropout",
        "use_cache",
    }),
    "smollm3": frozenset({
        "attention_bias", "attention_dropout", "mlp_bias", "no_rope_layer_interval", "use_cache",
        "use_sliding_window",
    }),
}  # fmt: skip
"""What besides cannot be null in a config of this type."""


def cannot_be_null(kind: str) -> frozenset[str]:
    """The fields of a config of type `kind` that hold something or are absent; empty where that is not known."""
    return EVERY_TYPE | MORE[kind] if kind in MORE else frozenset()
