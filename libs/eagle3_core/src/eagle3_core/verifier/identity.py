"""Who a verifier is: read from its folder in milliseconds, without loading a weight.

Hidden states and drafters belong to one exact verifier, so everything that decides what it says is digested apart:
config, tokenizer, chat template, weights (`verifier.weights` says how). A mismatch later can then say which of them
differs. The folder's place and name are no part of the digest: a moved checkpoint is the same.

What cannot be used is refused here, before any compute: pickled weights, repositories that need their own code, types
that no drafter can be made for, tokenizers or templates that are missing, and folders whose parts contradict each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_core.digests import digest_bytes, digest_file, digest_json
from eagle3_core.verifier.agreement import check_agreement, is_tied, layer_tensors
from eagle3_core.verifier.fields import check_fields
from eagle3_core.verifier.folder import (
    UnsupportedVerifier,
    VerifierConfig,
    VerifierMissing,
    VerifierRemoteCode,
    VerifierTemplate,
    VerifierTokenizer,
    read_json,
    read_json_if_there,
    refusal,
    size_in,
    text_config,
)
from eagle3_core.verifier.kinds import KNOWN_TYPES, REFUSED
from eagle3_core.verifier.vocabulary import SpecialIds, Vocabulary
from eagle3_core.verifier.weights import fingerprint

TOKENIZER_FILES = (
    "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
"""Files, besides tokenizer_config.json, that decide how text becomes tokens."""
MAX_TEMPLATE_BYTES = 1 << 20
"""Largest chat template (those in use have up to 20 KB)."""


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
    """Whether the output head is the embedding."""
    eos_token_ids: tuple[int, ...]
    """Every token that ends an answer, ascending: of config, generation config and tokenizer together, as SGLang does."""
    bos_token_id: int | None
    pad_token_id: int | None
    last_layer: frozenset[str]
    """Names of the last decoder layer's tensors, from the layer on (`self_attn.q_proj.weight`)."""
    text_config: dict[str, Any]
    """The config of the language model: the outer one, or its `text_config`."""

    def longest(self, max_seq_len: int) -> int:
        """Tokens of a sample, prompt and answer together, that is asked for up to `max_seq_len`: never beyond the positions
        that the verifier knows."""
        return min(max_seq_len, self.max_position_embeddings)

    def always_drafted(self) -> frozenset[int]:
        """Tokens that every draft vocabulary holds: those that end an answer, and added tokens that the chat template
        writes (turn and tool-call markers). Raises VerifierTokenizer."""
        tokenizer = read_json(self.folder / "tokenizer.json", VerifierTokenizer)
        added: list[dict[str, Any]] = tokenizer.get("added_tokens") or []
        in_template = {int(t["id"]) for t in added if t.get("content") and t["content"] in self.chat_template}
        return frozenset(self.eos_token_ids) | in_template


def inspect(folder: Path, *, revision: str = "local") -> Identity:
    """The identity of the checkpoint in `folder`.

    Raises VerifierMissing, VerifierConfig, VerifierRemoteCode, VerifierTokenizer, VerifierTemplate, VerifierWeights,
    VerifierMismatch, UnsupportedVerifier.
    """
    try:
        return _inspect(folder, revision)
    except OSError as error:
        raise refusal(
            VerifierMissing,
            f"{error.filename or folder} cannot be read: {error.strerror or error}",
            "give a folder whose files this process may read, and that does not change meanwhile",
        ) from None


def _inspect(folder: Path, revision: str) -> Identity:
    config = _config(folder)
    text = text_config(config)
    _refuse_kind(folder, config, text)
    for part in (config, text):
        check_fields(part)
    tokenizer_config = _tokenizer_config(folder)
    vocabulary = Vocabulary.read(folder, tokenizer_config)
    template = chat_template(folder, tokenizer_config)
    weights = fingerprint(folder)
    check_agreement(text, weights)
    digests = {
        "config": digest_json(config),
        "tokenizer": _tokenizer_digest(folder, tokenizer_config),
        "chat_template": digest_bytes(template.encode()),
        "weights": weights.digest,
    }
    generation = read_json_if_there(folder / "generation_config.json", VerifierConfig)
    rows = size_in(text, "vocab_size")
    vocabulary.check_fits(rows, template)
    ids = SpecialIds(config, text, generation, vocabulary.special_ids, rows)
    eos, heads, hidden = ids.ends(), size_in(text, "num_attention_heads"), size_in(text, "hidden_size")
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
        special_tokens=vocabulary.special_tokens,
        model_type=str(config.get("model_type", "")),
        architecture=_first(config.get("architectures")),
        hidden_size=hidden,
        num_layers=size_in(text, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=size_in(text, "num_key_value_heads", heads),
        head_dim=size_in(text, "head_dim", max(1, hidden // heads)),
        vocab_size=rows,
        max_position_embeddings=size_in(text, "max_position_embeddings"),
        tie_word_embeddings=is_tied({**text, **config}, weights),
        eos_token_ids=eos,
        bos_token_id=ids.one("bos_token"),
        pad_token_id=ids.one("pad_token"),
        last_layer=layer_tensors(weights, size_in(text, "num_hidden_layers") - 1),
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


def _refuse_kind(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> None:
    """Refuse types that run only with code of their own, that nobody knows, and that no drafter can be made for."""
    kind, mapped = config.get("model_type"), config.get("auto_map")
    code = [v for v in (mapped.values() if isinstance(mapped, dict) else []) if isinstance(v, str)]
    if code and (not isinstance(kind, str) or kind not in KNOWN_TYPES):
        raise refusal(
            VerifierRemoteCode,
            f"{folder.name} (model_type {kind!r:.80}) runs only with Python code of its repository: {', '.join(code):.400}",
            "use a model type that transformers knows itself; code from a checkpoint is never executed",
        )
    if not isinstance(kind, str) or kind not in KNOWN_TYPES:
        raise refusal(
            UnsupportedVerifier,
            f"config.json of {folder.name} says model_type={kind!r:.80}, which this version's transformers does not know as a "
            "language model",
            "use a decoder-only language model of a known type, or a newer version of Aerie",
        )
    inner = text.get("model_type", kind)
    kind = next((k for k in (inner, kind) if isinstance(k, str) and k in REFUSED), None)
    if kind is not None:
        raise refusal(
            UnsupportedVerifier,
            f"{folder.name} is of type {kind}, which {REFUSED[kind]}; drafters are made for plain ones",
            "use a verifier with softmax attention in every layer, an RMS final norm (gain w) and an unscaled linear "
            "head, as Llama, Qwen, DeepSeek and Kimi have",
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


def chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str:
    """Source of the default chat template: `chat_template.jinja`, else the tokenizer config's. Raises VerifierTemplate."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            if (size := file.stat().st_size) > MAX_TEMPLATE_BYTES:
                raise ValueError(f"it has {size} bytes, a template has at most {MAX_TEMPLATE_BYTES}")
            stated: Any = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
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


def _first(names: Any) -> str:
    """The first of a list of names, empty where there is none."""
    return str(names[0]) if isinstance(names, list) and names else ""
