"""Random drafters and samples for tests: every part real, nothing learnt, no checkpoint needed.

Weights are large enough that each tensor matters to every logit, so a wrong sign, norm or position shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from eagle3_core.drafter.chains import LabelRule, plan_chains
from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.step import PackedBatch
from eagle3_core.drafter.tensors import tensor_shapes
from eagle3_core.drafter.verifier_parts import Teacher
from eagle3_core.shards.format import kept_positions
from eagle3_core.verifier.contract import CaptureContract


def tiny_config(
    algorithm: Literal["eagle3.1", "eagle3"] = "eagle3.1", *, heads: int = 4, kv_heads: int = 2, vocab: int = 40,
    draft_vocab: int = 24, steps: int = 3,
) -> DrafterConfig:  # fmt: skip
    """A drafter of hidden size 16."""
    return DrafterConfig(
        algorithm=algorithm, hidden_size=16, intermediate_size=24, num_heads=heads, num_kv_heads=kv_heads, head_dim=8,
        hidden_act="silu", rms_norm_eps=1e-5, initializer_range=0.02,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0}, max_position_embeddings=512, vocab_size=vocab,
        draft_vocab_size=draft_vocab, aux_layers=(2, 4, 5), ttt_steps=steps, verifier_model_type="llama",
        verifier_architectures=("LlamaForCausalLM",),
    )  # fmt: skip


def random_drafter(config: DrafterConfig, seed: int = 0) -> Drafter:
    """Random weights, all of which require a gradient, and a random draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        drawn = torch.randn(shape, generator=generator)
        weights[name] = (1.0 + 0.3 * drawn if len(shape) == 1 else drawn * shape[-1] ** -0.5).requires_grad_()
    tokens = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    t2d_V = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d_V[tokens] = True
    embedding_VH = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    return Drafter.assemble(config, weights, embedding_VH, tokens - torch.arange(len(tokens)), t2d_V)


def random_teacher(config: DrafterConfig, seed: int = 1, final: Literal["pre", "post"] = "pre") -> Teacher:
    """A random head over the draft vocabulary, sharp enough to have an opinion."""
    generator = torch.Generator().manual_seed(seed)
    head_VdH = torch.randn(config.draft_vocab_size, config.hidden_size, generator=generator)
    gain_H = 1.0 + 0.3 * torch.randn(config.hidden_size, generator=generator)
    return Teacher(gain_H, head_VdH, config.rms_norm_eps, final)


@dataclass(frozen=True)
class MemorySample:
    """One sample with its states."""

    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    final: Tensor
    final_index: Tensor


@dataclass(frozen=True)
class MemorySamples:
    """Samples that lie in memory, as `train.feed` reads them."""

    contract: CaptureContract
    samples: tuple[MemorySample, ...]

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.samples)

    def sample(self, index: int) -> MemorySample:
        """Sample `index`."""
        return self.samples[index]

    def loss_mask(self, index: int) -> Tensor:
        """Its mask."""
        return self.samples[index].loss_mask


def tiny_contract(hidden_size: int, vocab_size: int, verifier: str = "v" * 64) -> CaptureContract:
    """A capture contract of no real verifier."""
    return CaptureContract(
        verifier=verifier, verifier_name="tiny", revision="local", config_digest="c", tokenizer_digest="t",
        chat_template_digest="m", hidden_size=hidden_size, num_layers=8, vocab_size=vocab_size, aux_layers=(2, 4, 5),
        dtype="float32", stored_dtype="float32", kv_cache_dtype="float32", attention="eager", engine="none",
        engine_version="0", capture_pass="decode",  # noqa: S106
    )  # fmt: skip


def random_samples(masks: Sequence[str], hidden: int = 16, vocab: int = 40, seed: int = 0) -> MemorySamples:
    """Samples with random tokens and states; a mask is written as a string of 0 and 1, for instance `00111`."""
    generator = torch.Generator().manual_seed(seed)
    samples: list[MemorySample] = []
    for text in masks:
        mask_T = torch.tensor([int(c) for c in text], dtype=torch.uint8)
        kept = kept_positions(mask_T)
        samples.append(
            MemorySample(
                torch.randint(0, vocab, (len(text),), generator=generator, dtype=torch.int32),
                mask_T,
                torch.randn(len(text), 3 * hidden, generator=generator),
                torch.randn(len(text), hidden, generator=generator)[kept.long()],
                kept,
            )
        )
    return MemorySamples(tiny_contract(hidden, vocab), tuple(samples))


def pack(samples: MemorySamples, steps: int, rule: LabelRule = "serving") -> PackedBatch:
    """All of `samples` end to end, plainly."""
    lengths = [len(s.input_ids) for s in samples.samples]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    row_T = torch.full((int(offsets[-1]),), -1, dtype=torch.long)
    kept = 0
    for start, s in zip(offsets, samples.samples, strict=False):
        row_T[int(start) + s.final_index.long()] = torch.arange(kept, kept + len(s.final))
        kept += len(s.final)
    mask_T = torch.cat([s.loss_mask for s in samples.samples]).numpy()
    return PackedBatch(
        torch.cat([s.input_ids for s in samples.samples]).long(), offsets, torch.cat([s.aux for s in samples.samples]),
        torch.cat([s.final for s in samples.samples]), row_T, plan_chains(mask_T, offsets, steps, rule),
        tuple(range(len(samples))),
    )  # fmt: skip
