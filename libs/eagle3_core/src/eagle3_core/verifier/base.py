"""What every engine that runs the verifier gives back, whichever it is.

Shapes: T tokens of a sequence, H hidden size. `aux` holds the inputs of three layers side by side [T, 3H]; `final`
the input of the final norm [T, H]; N tokens have N states, the last token included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from eagle3_core.errors import AerieError
from eagle3_core.verifier.contract import CaptureContract
from eagle3_core.verifier.identity import Identity

STORED_DTYPE = torch.bfloat16
"""States are kept in bfloat16 whatever the verifier runs in: half the bytes, and drafters trained on them accept as
many tokens as on float32 states (measured on SmolLM2: the same verify calls on 58 of 60 prompts)."""


class StatesNotFinite(AerieError):
    """A hidden state is NaN or infinite."""

    code, status = "states.not_finite", 422


class SelfCheckFailed(AerieError):
    """What the engine captures is not what the contract says."""

    code, status = "verifier.self_check", 500


def contract_of_run(
    who: Identity, *, revision: str, aux_layers: tuple[int, int, int], dtype: str, kv_cache_dtype: str, attention: str,
    engine: str, engine_version: str, capture_pass: Literal["decode", "prefill"], parallel: str = "tp1",
    plugin_version: str | None = None,
) -> CaptureContract:  # fmt: skip
    """How an engine that runs `who` captures: what the verifier is, which is the same for all engines, and how it is run."""
    return CaptureContract(
        verifier=who.digest,
        verifier_name=who.name,
        revision=revision,
        config_digest=who.config_digest,
        tokenizer_digest=who.tokenizer_digest,
        chat_template_digest=who.chat_template_digest,
        hidden_size=who.hidden_size,
        num_layers=who.num_layers,
        vocab_size=who.vocab_size,
        aux_layers=aux_layers,
        dtype=dtype,
        stored_dtype=str(STORED_DTYPE).removeprefix("torch."),
        kv_cache_dtype=kv_cache_dtype,
        attention=attention,
        parallel=parallel,
        engine=engine,
        engine_version=engine_version,
        plugin_version=plugin_version,
        capture_pass=capture_pass,
    )


@dataclass(frozen=True)
class States:
    """Captured states; leading dimensions are those of the tokens."""

    aux: Tensor
    """[..., 3H]: the inputs of the three aux layers, side by side."""
    final: Tensor
    """[..., H]: the input of the final norm."""

    def stored(self) -> States:
        """As they are kept: `STORED_DTYPE`, in main memory."""
        return States(self.aux.to("cpu", STORED_DTYPE), self.final.to("cpu", STORED_DTYPE))

    def row(self, row: int, stop: int | None = None) -> States:
        """The first `stop` tokens of sequence `row`, of states [B, n, ...]."""
        return States(self.aux[row, :stop], self.final[row, :stop])

    @classmethod
    def cat(cls, parts: Sequence[States]) -> States:
        """States of consecutive tokens as one."""
        return cls(torch.cat([p.aux for p in parts]), torch.cat([p.final for p in parts]))


@dataclass(frozen=True)
class Generated:
    """A prompt with the verifier's own greedy answer."""

    index: int
    """Which of the given prompts."""
    ids: list[int]
    """Prompt and answer, the end-of-sequence token included if it came."""
    prompt_len: int
    ended: bool
    """Whether an end-of-sequence token ended the answer (else it was cut)."""
    states: States | None
    """States of `ids`, one for each, as stored; None unless asked for."""


@dataclass(frozen=True)
class Decoding:
    """How answers are generated."""

    max_new_tokens: int
    batch_size: int
    eos_ids: Sequence[int]
    """Tokens that end an answer; the one that came is part of it."""
    keep_states: bool = False
    max_seq_len: int | None = None
    """Longest prompt and answer together, in tokens; None = no such limit. An answer has one token at least."""

    temperature: float = 0.0
    """0 = greedy: the most likely token each time. Engines that cannot do more refuse more."""
    top_p: float = 1.0

    def limit(self, prompt_len: int) -> int:
        """Tokens at which the answer to a prompt of `prompt_len` is cut."""
        room = self.max_new_tokens if self.max_seq_len is None else self.max_seq_len - prompt_len
        return max(1, min(self.max_new_tokens, room))


@dataclass(frozen=True)
class Captured:
    """The states of a given sequence."""

    index: int
    """Which of the given sequences."""
    states: States
    following: int | None = None
    """The token that the engine says comes after the last one; None if it does not say."""


class Progressed(Protocol):
    """Called as work goes on; raises to stop it."""

    def __call__(self, *, done: int, tokens: int) -> None:
        """`done` sequences are finished; `tokens` were computed since the start."""
        ...


class Verifier(Protocol):
    """An engine with the verifier loaded."""

    identity: Identity
    keeps_states: bool
    """Whether `generate` keeps the states of its own pass."""

    def contract(self, capture_pass: Literal["decode", "prefill"]) -> CaptureContract:
        """How this engine captures."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], how: Decoding, on_progress: Progressed) -> Iterator[Generated]:
        """Answers, each yielded when it is finished."""
        ...

    def capture(
        self, sequences: Sequence[Sequence[int]], *, batch_tokens: int, on_progress: Progressed
    ) -> Iterator[Captured]:
        """States of given sequences by prefill, each yielded when it is finished."""
        ...


def all_finite(values: Tensor) -> bool:
    """Whether no element is NaN or infinite. One pass: `isfinite().all()` makes four, 80 ms of CPU for 25 MB and not 3."""
    return values.numel() == 0 or all(bool(torch.isfinite(end)) for end in torch.aminmax(values))


def require_finite(sample_id: str, aux_T3H: Tensor, final_MH: Tensor, aux_layers: Sequence[int]) -> None:
    """Raise StatesNotFinite, naming the sample, the layer and the first bad row, unless every state is a number."""
    if all_finite(aux_T3H) and all_finite(final_MH):
        return
    parts = [
        (f"the input of layer {layer}", part) for layer, part in zip(aux_layers, aux_T3H.chunk(3, -1), strict=True)
    ]
    for name, states in [*parts, ("the input of the final norm", final_MH)]:
        bad = ~torch.isfinite(states).all(-1)
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise StatesNotFinite(
                f"sample {sample_id}: {name} is not finite at row {row} of {len(states)}",
                remedy="run the verifier in bfloat16 or float32 (float16 overflows), or drop the sample",
                sample=sample_id,
            )
