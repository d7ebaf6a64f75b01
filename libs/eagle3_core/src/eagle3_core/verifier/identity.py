"""Who a verifier is: read from its folder in milliseconds, without loading a weight.

Hidden states and drafters belong to one exact verifier, so everything that decides what it says is digested apart:
config, tokenizer, chat template, weights (`verifier.weights` says how). A mismatch later can then say which of them
differs. The folder's place and name are no part of the digest: a moved checkpoint is the same.

What cannot be used is refused here, before any compute: pickled weights, repositories that need their own code, and
tokenizers or templates that are missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_core.digests import digest_bytes, digest_file, digest_json
from eagle3_core.verifier.folder import (
    VerifierConfig,
    VerifierMissing,
    VerifierRemoteCode,
    VerifierTemplate,
    VerifierTokenizer,
    read_json,
    read_json_if_there,
    refusal,
)
from eagle3_core.verifier.weights import fingerprint

TOKENIZER_FILES = (
    "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
"""Files, besides tokenizer_config.json, that decide how text becomes tokens."""

NATIVE_MODEL_TYPES = frozenset({
    "bamba", "cohere", "cohere2", "dbrx", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon",
    "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_oss", "granite",
    "granitemoe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "jamba", "kimi_k25", "lfm2", "llama",
    "llama4", "llama4_text", "minimax", "ministral", "mistral", "mistral3", "mixtral", "nemotron", "olmo", "olmo2",
    "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "seed_oss",
    "smollm3", "stablelm", "starcoder2",
})  # fmt: skip
"""Model types that run without a repository's own code, so that an `auto_map` beside them can be ignored (a test compares
this list with transformers)."""


@dataclass(frozen=True)
class Identity:
    """A verifier as its folder describes it. Sizes are counts of elements; digests are hex BLAKE3."""

    name: str
    """Name of the folder; a label, no part of the digest."""
    folder: Path
    revision: str
    """Revision as the job states it; a label, no part of the digest."""
    digest: str
    """Digest over the four below and the tokens that end an answer: another end gives other answers."""
    config_digest: str
    tokenizer_digest: str
    chat_template_digest: str
    weights_digest: str
    chat_template: str
    """Source of the (default) chat template, jinja."""
    special_tokens: dict[str, str]
    """Special tokens by role (`bos_token`, `eos_token`, ...), as the chat template sees them."""
    model_type: str
    """`model_type` of the outer config."""
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding; may exceed what the tokenizer uses."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    """Whether the output head is the embedding: the weights hold no head of its own."""
    eos_token_ids: tuple[int, ...]
    """Every token that ends an answer, ascending: of config, generation config and tokenizer together, as SGLang does."""
    bos_token_id: int | None
    pad_token_id: int | None
    last_layer: frozenset[str]
    """Names of the last decoder layer's tensors, from the layer on (`self_attn.q_proj.weight`)."""
    text_config: dict[str, Any]
    """The config of the language model: the outer one, or its `text_config`."""


def inspect(folder: Path, *, revision: str = "local") -> Identity:
    """The identity of the checkpoint in `folder`.

    Raises VerifierMissing, VerifierConfig, VerifierRemoteCode, VerifierTokenizer, VerifierTemplate, VerifierWeights.
    """
    config = _config(folder)
    text = _text_config(config)
    _refuse_remote_code(folder, config)
    tokenizer_config = _tokenizer_config(folder)
    special, special_ids = _special_tokens(folder, tokenizer_config)
    template = chat_template(folder, tokenizer_config)
    weights = fingerprint(folder)
    digests = {
        "config": digest_json(config),
        "tokenizer": _tokenizer_digest(folder, tokenizer_config),
        "chat_template": digest_bytes(template.encode()),
        "weights": weights.digest,
    }
    generation = read_json_if_there(folder / "generation_config.json", VerifierConfig)
    eos = _eos(config, text, generation, special_ids)
    heads = _count(text, "num_attention_heads")
    hidden = _count(text, "hidden_size")
    return Identity(
        name=folder.name,
        folder=folder,
        revision=revision,
        digest=digest_json({**digests, "eos": list(eos)}),
        config_digest=digests["config"],
        tokenizer_digest=digests["tokenizer"],
        chat_template_digest=digests["chat_template"],
        weights_digest=digests["weights"],
        chat_template=template,
        special_tokens=special,
        model_type=str(config.get("model_type", "")),
        architecture=_first(config.get("architectures")),
        hidden_size=hidden,
        num_layers=_count(text, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_count(text, "num_key_value_heads", heads),
        head_dim=_count(text, "head_dim", hidden // heads),
        vocab_size=_count(text, "vocab_size"),
        max_position_embeddings=_count(text, "max_position_embeddings"),
        tie_word_embeddings=not any(name.endswith("lm_head.weight") for name in weights.tensors),
        eos_token_ids=eos,
        bos_token_id=_one_id(special_ids.get("bos_token"), generation.get("bos_token_id"), text.get("bos_token_id")),
        pad_token_id=_one_id(special_ids.get("pad_token"), generation.get("pad_token_id"), text.get("pad_token_id")),
        last_layer=_layer_tensors(weights.tensors, _count(text, "num_hidden_layers") - 1),
        text_config=text,
    )


def _config(folder: Path) -> dict[str, Any]:
    """The outer config.json, without fields that say nothing about the model (library versions, local paths)."""
    if not folder.is_dir():
        raise refusal(
            VerifierMissing,
            f"there is no folder {folder}",
            "give the folder of a Hugging Face checkpoint: config.json, tokenizer, safetensors",
        )
    if not (folder / "config.json").is_file():
        raise refusal(
            VerifierMissing,
            f"{folder} holds no config.json, so it is no Hugging Face checkpoint",
            "point verifier.model at the folder that holds config.json (in a hub cache: snapshots/REVISION)",
        )
    config = read_json(folder / "config.json", VerifierConfig)
    return {k: v for k, v in config.items() if k not in ("transformers_version", "_name_or_path")}


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part: vision-language and Kimi-K2.5 configs nest it under `text_config`."""
    for key in ("text_config", "llm_config", "language_config"):
        nested = config.get(key)
        if isinstance(nested, dict):
            return {str(name): value for name, value in nested.items()}
    return config


def _count(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refusal(
            VerifierConfig,
            f"the verifier's config says {key}={value!r}, a positive whole number is needed",
            "use a decoder-only language model whose config.json (or its text_config) names its sizes",
        )
    return value


def _layer_tensors(tensors: frozenset[str], layer: int) -> frozenset[str]:
    mark = f".layers.{layer}."
    return frozenset(name.split(mark, 1)[1] for name in tensors if mark in name)


def _refuse_remote_code(folder: Path, config: dict[str, Any]) -> None:
    mapped: Any = config.get("auto_map")
    code = [v for v in (mapped.values() if isinstance(mapped, dict) else []) if isinstance(v, str)]
    if code and config.get("model_type") not in NATIVE_MODEL_TYPES:
        raise refusal(
            VerifierRemoteCode,
            f"{folder.name} (model_type {config.get('model_type')!r}) runs only with Python code of its repository: {', '.join(code)}",
            "use a model type that transformers knows itself; code from a checkpoint is never executed",
        )


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise refusal(
                VerifierTokenizer,
                f"{folder} has no {name}",
                "copy the tokenizer of the model beside its weights; where only a slow one exists, "
                "AutoTokenizer.from_pretrained(...).save_pretrained(folder) writes both files",
            )
    return read_json(folder / "tokenizer_config.json", VerifierTokenizer)


def _special_tokens(folder: Path, tokenizer_config: dict[str, Any]) -> tuple[dict[str, str], dict[str, int]]:
    """Special tokens by role: their text and their ids. Raises VerifierTokenizer when one has no id."""
    stated = {**read_json_if_there(folder / "special_tokens_map.json", VerifierTokenizer), **tokenizer_config}
    texts: dict[str, str] = {}
    for role, value in stated.items():
        token: Any = value.get("content") if isinstance(value, dict) else value
        if role.endswith("_token") and isinstance(token, str):
            texts[role] = token
    tokenizer = read_json(folder / "tokenizer.json", VerifierTokenizer)
    added, model = tokenizer.get("added_tokens") or [], tokenizer.get("model") or {}
    if not isinstance(model, dict) or not isinstance(added, list) or not all(isinstance(e, dict) for e in added):
        raise refusal(
            VerifierTokenizer,
            f"{folder / 'tokenizer.json'} has a model or added_tokens of the wrong kind",
            "download the tokenizer again",
        )
    vocabulary: Any = model.get("vocab")
    known = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    known.update({str(entry.get("content")): entry.get("id") for entry in added})
    for role in ("eos_token", "bos_token"):
        if role in texts and texts[role] not in known and not isinstance(vocabulary, list):
            raise refusal(
                VerifierTokenizer,
                f"tokenizer_config.json says {role}={texts[role]!r}, tokenizer.json knows no such token",
                "use tokenizer.json and tokenizer_config.json of one and the same release of the model",
            )
    return texts, {role: known[token] for role, token in texts.items() if isinstance(known.get(token), int)}


def chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str:
    """Source of the default chat template: `chat_template.jinja`, else the tokenizer config's. Raises VerifierTemplate."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            stated: Any = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise refusal(VerifierTemplate, f"{file} cannot be read: {error}", "copy the file again") from None
    else:
        stated = tokenizer_config.get("chat_template")
        if isinstance(stated, list):
            named = {str(t.get("name")): t.get("template") for t in stated if isinstance(t, dict)}
            stated = named.get("default")
    if not isinstance(stated, str) or not stated.strip():
        raise refusal(
            VerifierTemplate,
            f"{folder} has no chat template, neither chat_template.jinja nor in tokenizer_config.json",
            "use the instruction-tuned release of the model, or add the template that you serve it with as chat_template.jinja",
        )
    return stated


def _tokenizer_digest(folder: Path, tokenizer_config: dict[str, Any]) -> str:
    stated = {
        k: v for k, v in tokenizer_config.items() if k not in ("chat_template", "name_or_path", "local_files_only")
    }
    files = {name: digest_file(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}
    return digest_json({"config": stated, "files": files})


def _eos(
    config: dict[str, Any], text: dict[str, Any], generation: dict[str, Any], special_ids: dict[str, int]
) -> tuple[int, ...]:
    found: set[int] = set()
    for value in (config.get("eos_token_id"), text.get("eos_token_id"), generation.get("eos_token_id")):
        entries: list[Any] = value if isinstance(value, list) else [value]
        found.update(entry for entry in entries if isinstance(entry, int))
    if "eos_token" in special_ids:
        found.add(special_ids["eos_token"])
    if not found:
        raise refusal(
            VerifierTokenizer,
            "neither config, generation config nor tokenizer name an end-of-turn token",
            "set eos_token_id in generation_config.json to the token that ends an answer",
        )
    return tuple(sorted(found))


def _one_id(*candidates: Any) -> int | None:
    return next((value for value in candidates if isinstance(value, int)), None)


def _first(names: Any) -> str:
    """The first of a list of names, empty where there is none."""
    return str(names[0]) if isinstance(names, list) and names else ""
