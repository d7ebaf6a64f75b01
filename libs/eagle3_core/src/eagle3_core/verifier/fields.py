"""What the fields of a verifier's config.json can hold, where transformers would stumble over anything else.

Sizes are read where they are used (`folder.size_in`). The fields here nobody in this house reads: the libraries that load
the model do, long after the job was posted, and say `'int' object is not iterable` of what they find. So each is held
against its kind when the job is posted, and named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from eagle3_core.verifier.folder import UnsupportedVerifier, VerifierConfig, refusal
from eagle3_core.verifier.nulls import cannot_be_null

COUNTS = frozenset({
    "first_k_dense_replace", "kv_lora_rank", "max_window_layers", "moe_intermediate_size", "n_group", "n_routed_experts",
    "n_shared_experts", "num_experts", "num_experts_per_tok", "num_local_experts", "num_nextn_predict_layers",
    "pretraining_tp", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "topk_group", "v_head_dim",
})  # fmt: skip
NUMBERS = frozenset({
    "attention_dropout", "partial_rotary_factor", "routed_scaling_factor", "router_aux_loss_coef", "sliding_window",
})  # fmt: skip
FRACTIONS = frozenset({"initializer_range", "rms_norm_eps"})
FLAGS = frozenset({
    "attention_bias", "mlp_bias", "norm_topk_prob", "return_dict", "use_cache", "use_sliding_window",
})  # fmt: skip
OBJECTS = frozenset({
    "attribute_map", "auto_map", "base_model_pp_plan", "base_model_tp_plan", "language_config", "label2id", "llm_config",
    "rope_parameters", "rope_scaling", "sub_configs", "text_config",
})  # fmt: skip
NUMBERED = frozenset({"id2label", "per_layer_config"})
DTYPES = frozenset({"bfloat16", "float16", "float32", "float64"})
"""Element types that weights are kept in, in torch's names; what the verifier runs in says the job."""
MAX_LABELS = 1 << 20
"""Classes that a classifier of the same model may have had: transformers makes a name for each."""


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbered(value: Any) -> bool:
    return isinstance(value, dict) and all(name.isascii() and name.isdigit() for name in map(str, value))


_KINDS: tuple[tuple[frozenset[str], Callable[[Any], bool], str], ...] = (
    (COUNTS, _whole, "a whole number from 0 on"),
    (NUMBERS, _number, "a number"),
    (FRACTIONS, lambda value: isinstance(value, float) and 0 < value < 1, "a number between 0 and 1"),
    (FLAGS, lambda value: isinstance(value, bool), "true or false"),
    (OBJECTS, lambda value: isinstance(value, dict), "an object"),
    (NUMBERED, _numbered, "an object whose names are whole numbers"),
    (frozenset({"num_labels"}), lambda value: _whole(value) and value <= MAX_LABELS, f"at most {MAX_LABELS}, a count,"),
    (
        frozenset({"dtype", "torch_dtype"}),
        lambda value: isinstance(value, dict) or (isinstance(value, str) and value in DTYPES),
        f"one of {', '.join(sorted(DTYPES))}",
    ),
)


def check_fields(config: Mapping[str, Any]) -> None:
    """Raise VerifierConfig where a field of `config` holds what it cannot, UnsupportedVerifier for quantised checkpoints."""
    for name, value in config.items():
        for names, fits, what in _KINDS:
            if name in names and value is not None and not fits(value):
                raise refusal(
                    VerifierConfig,
                    f"the verifier's config says {name}={value!r:.200}, {what} is needed",
                    "repair config.json, or download it again",
                )
    kind = str(config.get("model_type"))
    if nulls := sorted(name for name in cannot_be_null(kind) & config.keys() if config[name] is None):
        raise refusal(
            VerifierConfig,
            f"the verifier's config says {nulls[0]}=null, and in a config of type {kind} that field is a value or absent",
            f"give {', '.join(nulls)} a value in config.json, or leave it out",
        )
    for name in ("quantization_config", "compression_config"):
        if (quantised := config.get(name)) is not None:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else None
            raise refusal(
                UnsupportedVerifier,
                f"config.json says {name} with quant_method={method!r:.80}; the transformers backend runs unquantised "
                "checkpoints",
                "use the model's release in bfloat16 or float16",
            )
