"""The test kit: tiny verifiers, data sets and jobs, complete enough for every stage to run on them for real.

A tiny verifier is a Hugging Face checkpoint in every respect but size: a Llama config, a byte-level BPE tokenizer, a
ChatML template and random weights, written without torch in a few milliseconds and the same on every machine. So tests
of any package, of ours or of somebody who builds on this library, need no download and no stand-in.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from eagle3_core.jobs.graph import StageName
from eagle3_core.jobs.spec import JobSpec, parse_job
from eagle3_core.jobs.wire import Assignment, LogLine, ManifestRef, Metric, Progress, UnitSlice
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.protocol import ObjectStore
from eagle3_core.stages.context import StageContext

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Chat template of a tiny verifier."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2: unknown, begin of a turn, end of a turn."""

WORDS = (
    "the", "and", "that", "have", "with", "this", "from", "what", "answer", "question", "number", "there", "which",
    "about", "would", "write", "list", "name", "city", "river", "house", "garden", "train", "station", "morning",
    "evening", "window", "people", "water", "light", "paper", "letter",
)  # fmt: skip
"""Words that the tiny tokenizer has learnt after a space, as far as its vocabulary has room."""

ROLES = ("user", "assistant", "system")
"""Words that it has learnt without one, since a turn begins with them."""


def tiny_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab` tokens, at least 128.

    From 272 tokens on it encodes any text without loss; below, anything but printable ASCII becomes `<|endoftext|>`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab < len(SPECIAL_TOKENS) + len(alphabet):
        alphabet = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    if vocab < len(SPECIAL_TOKENS) + len(alphabet):
        raise ValueError(f"a vocabulary of {vocab} holds no alphabet; 128 is the least")
    ids = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    merges: list[tuple[str, str]] = []
    for left, word in [*((role[0], role[1:]) for role in ROLES), *(("Ġ", word) for word in WORDS)]:
        for letter in word:
            if len(ids) < vocab and left + letter not in ids:
                merges.append((left, letter))
                ids[left + letter] = len(ids)
            left += letter
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges, unk_token=SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def tiny_verifier(
    folder: Path,
    *,
    layers: int = 8,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 64,
    vocab: int = 320,
    max_position_embeddings: int = 2048,
    tie_word_embeddings: bool = False,
    chat_template: str | None = CHATML,
    seed: int = 0,
) -> Path:
    """Write a random Llama checkpoint (float32) into `folder`, which is made, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": hidden // heads,
        "intermediate_size": intermediate, "vocab_size": vocab, "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "dtype": "float32",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens})
    tiny_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    save_file(_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Random Llama weights under Hugging Face names, scaled so that every layer changes what is said."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (queries, hidden), f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden), f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden), f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner), f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    draw = np.random.default_rng(seed)
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else (draw.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write `rows` as JSON lines and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tiny_conversations(count: int, *, first: int = 0, answered: bool = False) -> list[dict[str, Any]]:
    """`count` different rows of format `messages` over two tasks; `first` shifts them, so that sets can be disjoint."""
    rows: list[dict[str, Any]] = []
    for i in range(first, first + count):
        word = WORDS[i % len(WORDS)]
        messages = [{"role": "user", "content": f"question number {i}: what about the {word}?"}]
        if answered:
            messages.append({"role": "assistant", "content": f"the {word} and that number {i}"})
        rows.append({"id": f"row-{i}", "task": ("words", "numbers")[i % 2], "messages": messages})
    return rows


def tiny_job(folder: Path, *, train: int = 12, held_out: int = 4, answered: bool = False) -> dict[str, Any]:
    """A job document whose verifier and data lie in `folder`: small in everything, whole in every part.

    `folder` is also the only root that its `file:` paths need. Change the document before `parse_job` as a test needs.
    """
    verifier = tiny_verifier(folder / "verifier")
    data = write_jsonl(folder / "train.jsonl", tiny_conversations(train, answered=answered))
    prompts = write_jsonl(folder / "eval.jsonl", tiny_conversations(held_out, first=10_000))
    return {
        "name": "tiny",
        "verifier": {"model": str(verifier), "dtype": "float32", "device": "cpu"},
        "datasets": [{"uri": str(data)}],
        "data": {
            "max_seq_len": 96,
            "val_ratio": 0.1,
            "unit_samples": 8,
            "regenerate": {"enabled": not answered, "max_new_tokens": 12, "batch_size": 4},
        },
        "vocab": {"draft_vocab_size": 64, "min_coverage": 0},
        "training": {"epochs": 1, "batch_tokens": 256, "dtype": "float32", "lr": 1e-3},
        "evaluation": {
            "prompts": [{"uri": str(prompts)}],
            "max_new_tokens": 12,
            "unit_prompts": 2,
            "batch_size": 2,
        },
    }


@dataclass
class RecordingReporter:
    """A reporter that remembers what a stage said."""

    said: list[Progress] = field(default_factory=list[Progress])
    metrics: list[Metric] = field(default_factory=list[Metric])
    lines: list[LogLine] = field(default_factory=list[LogLine])

    def progress(self, progress: Progress) -> None:
        """Remember how far the unit is."""
        self.said.append(progress)

    def metric(self, metric: Metric) -> None:
        """Remember a value of a curve."""
        self.metrics.append(metric)

    def log(self, line: LogLine) -> None:
        """Remember a line of the log."""
        self.lines.append(line)


def stage_context(
    folder: Path,
    stage: StageName,
    document: Mapping[str, Any] | JobSpec,
    *,
    sources: Mapping[str, str] | None = None,
    inputs: Mapping[StageName, Sequence[ManifestRef]] | None = None,
    results: Mapping[StageName, Mapping[str, Any]] | None = None,
    unit: UnitSlice | None = None,
    store: ObjectStore | None = None,
) -> StageContext:
    """The context of one attempt at one unit of `stage`, with its store, scratch and file root in `folder`."""
    spec = document if isinstance(document, JobSpec) else parse_job(dict(document))
    scratch = folder / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    assignment = Assignment(
        unit_run_id="unit-run", job_id="job", tenant="tenant", stage=stage,
        unit=unit or UnitSlice(index=0, start=0, stop=1, of=1), attempt=1, fence=1, token="", key="0" * 64,
        spec=spec, sources=dict(sources or {}), inputs={k: list(v) for k, v in (inputs or {}).items()},
        results={k: dict(v) for k, v in (results or {}).items()}, lease_s=60,
    )  # fmt: skip
    return StageContext(
        assignment=assignment,
        store=store or LocalStore(folder / "store"),
        scratch=scratch,
        reporter=RecordingReporter(),
        file_roots=(folder,),
        stop=threading.Event(),
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
