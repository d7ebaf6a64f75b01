"""Shards and drafters for tests of `inspect`, written from plain numpy arrays."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

NAN_BF16, ONE_BF16 = 0x7FC0, 0x3F80
H, V, VD, INTER = 4, 10, 3, 6
CONTRACT = {
    "verifier": "v" * 64, "verifier_name": "toy", "revision": "local", "config_digest": "c", "tokenizer_digest": "t",
    "chat_template_digest": "m", "hidden_size": H, "num_layers": 8, "vocab_size": V, "aux_layers": [2, 4, 5],
    "dtype": "float32", "stored_dtype": "bfloat16", "kv_cache_dtype": "float32", "attention": "slots", "engine": "toy",
    "engine_version": "1", "capture_pass": "decode",
}  # fmt: skip


def write_bf16(path, tensors, metadata):
    """A safetensors file in which uint16 arrays are declared to be bfloat16."""
    header, data, at = {"__metadata__": metadata}, b"", 0
    names = {"uint8": "U8", "int32": "I32", "int64": "I64", "uint16": "BF16", "float32": "F32"}
    for name, array in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": names[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(raw)],
        }
        data, at = data + raw, at + len(raw)
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)
    return path


def shard_tensors(states=ONE_BF16):
    """Two samples: five tokens of which the last two are supervised, and three of which none is."""
    aux = np.full((8, 3 * H), ONE_BF16, np.uint16)
    aux[3, 2] = states
    return {
        "input_ids": np.array([1, 20, 21, 22, 2, 1, 30, 2], np.int32),
        "loss_mask": np.array([0, 0, 0, 1, 1, 0, 0, 0], np.uint8),
        "sample_offsets": np.array([0, 5, 8], np.int64),
        "aux": aux,
        "final": np.full((3, H), ONE_BF16, np.uint16),
        "final_index": np.array([2, 3, 4], np.int32),
    }


def write_shard(path, *, states=ONE_BF16, header=None, **tensors):
    """A shard, with tensors of its own."""
    stated = {"schema_version": 1, "codec": "raw", "ids": ["a", "b"], "tasks": ["code", "qa"], **(header or {})}
    return write_bf16(path, {**shard_tensors(states), **tensors}, {"shard": json.dumps(stated)})


def offsets(*targets):
    """d2t for these targets."""
    return np.array(targets, np.int64) - np.arange(len(targets))


def drafter_tensors(layer="midlayer."):
    """A whole drafter of hidden size 4, one head, three of ten tokens."""
    draw = np.random.default_rng(0)
    shapes = {
        "fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (VD, H),
        f"{layer}self_attn.q_proj.weight": (H, 2 * H), f"{layer}self_attn.k_proj.weight": (H, 2 * H),
        f"{layer}self_attn.v_proj.weight": (H, 2 * H), f"{layer}self_attn.o_proj.weight": (H, H),
        f"{layer}mlp.gate_proj.weight": (INTER, H), f"{layer}mlp.up_proj.weight": (INTER, H),
        f"{layer}mlp.down_proj.weight": (H, INTER),
        **{f"{layer}{n}.weight": (H,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **{f"fc_norm.{i}.weight": (H,) for i in range(3)},
    }  # fmt: skip
    tensors = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    t2d = np.zeros(V, bool)
    t2d[[0, 4, 9]] = True
    return {**tensors, "d2t": offsets(0, 4, 9), "t2d": t2d}


SIZES = {
    "hidden_size": H, "intermediate_size": INTER, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": H,
    "vocab_size": V,
}  # fmt: skip
SGLANG = {"architectures": ["LlamaForCausalLMEagle3"], **SIZES, "draft_vocab_size": VD, "fc_norm": True}
SPECULATORS = {
    "speculators_model_type": "eagle3", "transformer_layer_config": SIZES, "draft_vocab_size": VD, "fc_norm": True,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
}  # fmt: skip


def write_package(folder, config, tensors):
    """One folder of a drafter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_drafter(folder: Path) -> Path:
    """A whole drafter: both packages and the contract."""
    write_package(folder / "sglang", SGLANG, drafter_tensors())
    embedding = np.ones((V, H), np.float32)
    write_package(
        folder / "speculators", SPECULATORS, {**drafter_tensors("layers.0."), "embed_tokens.weight": embedding}
    )
    (folder / "contract.json").write_text(json.dumps(CONTRACT))
    return folder
