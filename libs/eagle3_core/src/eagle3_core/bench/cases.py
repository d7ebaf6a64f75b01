"""The shapes that are measured, and the random work of each: one packed sample, its drafter and its teacher.

`S` is the drafter of an 8B verifier (Llama 3.1 8B's shape), `K` that of Kimi-K2.5, each with the tokens of a pass behind
it; `C1024` is SmolLM2-135M's, large enough that a CPU's time goes into products. Supervised tokens lie in contiguous
spans (the assistant's turns) of a given share, in turns of about 512 tokens, as in chats.

Shapes: T tokens, H hidden, V and Vd vocabularies.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from eagle3_core.drafter.chains import LabelRule
from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.model import Drafter, tensor_shapes
from eagle3_core.drafter.step import PackedBatch
from eagle3_core.drafter.testing import MemorySample, MemorySamples, pack, tiny_contract
from eagle3_core.drafter.verifier_parts import Teacher
from eagle3_core.shards.format import kept_positions

TURN = 512


@dataclass(frozen=True)
class Case:
    """One shape."""

    name: str
    tokens: int
    """T."""
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    steps: int
    turn: int = TURN
    algorithm: Literal["eagle3", "eagle3.1"] = "eagle3"
    """The peers know no other than the first."""

    def config(self) -> DrafterConfig:
        """The drafter's."""
        return DrafterConfig(
            algorithm=self.algorithm, hidden_size=self.hidden, intermediate_size=self.inner, num_heads=self.heads,
            num_kv_heads=self.kv_heads, head_dim=self.head_dim, hidden_act="silu", rms_norm_eps=1e-5,
            initializer_range=0.02, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            max_position_embeddings=max(4096, 2 * self.tokens), vocab_size=self.vocab, draft_vocab_size=self.draft_vocab,
            aux_layers=(2, 16, 29), ttt_steps=self.steps, verifier_model_type="llama",
            verifier_architectures=("LlamaForCausalLM",),
        )  # fmt: skip


_S = Case("S", 0, 4096, 14336, 32, 8, 128, 128256, 32000, 7)
_K = Case("K", 0, 7168, 18432, 64, 64, 128, 163840, 32000, 4)
_C = Case("C", 0, 576, 1536, 9, 3, 64, 49152, 8192, 3, turn=128)
_T = Case("T", 0, 64, 128, 4, 2, 16, 512, 128, 3, turn=32)

CASES: dict[str, Case] = {
    f"{base.name}{tokens}": replace(base, name=f"{base.name}{tokens}", tokens=tokens)
    for base, sizes in (
        (_S, (2048, 4096, 8192, 32768, 131072)),
        (_K, (2048, 4096, 8192)),
        (_C, (256, 1024)),
        (_T, (96,)),
    )
    for tokens in sizes
}
ON_CPU, ON_CUDA = ("C1024",), ("S2048", "S8192", "K4096")


def spans(tokens: int, density: float, turn: int, seed: int = 0) -> Tensor:
    """u8 [T]: a mask of contiguous spans, the user's first, `density` of it supervised."""
    drawn = random.Random(1000 * seed + tokens)  # noqa: S311
    turns = max(1, round(tokens / turn))
    user, assistant = ([drawn.uniform(0.5, 1.5) for _ in range(turns)] for _ in range(2))
    mask_T = torch.zeros(tokens, dtype=torch.uint8)
    at = 0.0
    for i in range(turns):
        start = at + user[i] / sum(user) * tokens * (1 - density)
        at = start + assistant[i] / sum(assistant) * tokens * density
        mask_T[round(start) : round(at)] = 1
    return mask_T


@dataclass(frozen=True)
class Work:
    """What every implementation of a case gets."""

    case: Case
    drafter: Drafter
    """float32, on the device."""
    teacher: Teacher
    samples: MemorySamples
    """One sample of T tokens."""

    @property
    def embedding_bytes(self) -> int:
        """Of the frozen embedding, which ours reads where it is and a peer copies."""
        return self.drafter.embedding_VH.nbytes

    @property
    def state_bytes(self) -> int:
        """Of the sample's hidden states."""
        return sum(sample.aux.nbytes + sample.final.nbytes for sample in self.samples.samples)

    def batch(self, rule: LabelRule) -> PackedBatch:
        """The sample as a batch of ours."""
        return pack(self.samples, self.case.steps, rule)


def make(case: Case, density: float, device: torch.device, *, train_head: bool, seed: int = 0) -> Work:
    """Random work of `case`; the same numbers for the same seed on the same device."""
    generator = torch.Generator(device).manual_seed(seed)
    states = torch.bfloat16 if device.type == "cuda" else torch.float32
    config, hidden = case.config(), case.hidden

    def drawn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scale)

    weights = {
        name: torch.ones(shape, device=device) if len(shape) == 1 else drawn(*shape, scale=0.02)
        for name, shape in tensor_shapes(config).items()
    }
    head_VdH = drawn(case.draft_vocab, hidden, scale=0.02)
    weights["lm_head.weight"] = head_VdH.clone()
    for name, weight in weights.items():
        weight.requires_grad_(train_head or name != "lm_head.weight")
    tokens = torch.randperm(case.vocab, generator=generator, device=device)[: case.draft_vocab].sort().values
    t2d_V = torch.zeros(case.vocab, dtype=torch.bool, device=device)
    t2d_V[tokens] = True
    embedding_VH = drawn(case.vocab, hidden, scale=0.02, dtype=states)
    drafter = Drafter.assemble(
        config, weights, embedding_VH, tokens - torch.arange(len(tokens), device=device), t2d_V
    )  # fmt: skip
    mask_T = spans(case.tokens, density, case.turn)
    kept = kept_positions(mask_T)
    sample = MemorySample(
        torch.randint(0, case.vocab, (case.tokens,), generator=generator, device=device, dtype=torch.int32), mask_T,
        drawn(case.tokens, 3 * hidden, dtype=states), drawn(len(kept), hidden, dtype=states), kept,
    )  # fmt: skip
    teacher = Teacher(torch.ones(hidden, device=device), head_VdH, config.rms_norm_eps, "pre")
    return Work(case, drafter, teacher, MemorySamples(tiny_contract(hidden, case.vocab), (sample,)))
