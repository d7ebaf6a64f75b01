"""Real speculative decoding: a drafter proposes a chain of K tokens, the verifier checks it in one pass.

This measures what a drafter is worth by doing what serving does, so nothing can flatter it: a token that its vocabulary
lacks is a miss, and a state that was captured at the wrong layer shows as a low acceptance length. Beside it the same
prompts are answered without a drafter, from the same prefilled cache, since speculative decoding that changes a single
token is broken, however fast.

One round, for a row with L known tokens x_0..x_{L-1} and states up to x_{L-2}:
    draft   pairs (x_{p+1}, g_p) that are new, up to p = L-2, then K-1 steps that feed back: candidates c_1..c_K
    verify  x_{L-1}, c_1..c_K at slots L-1..L-1+K: the verifier's own next tokens a_0..a_K
    accept  the longest prefix with c_i = a_{i-1}, and one token more, which the verifier gives for free
Rejected drafts need no clean-up: the next round overwrites their slots, in both caches.

Acceptance length = tokens after the first / verify calls. EOS counts as a token; what lies behind it, or behind the
cut, does not.

Shapes: B rows, K drafted tokens, W new pairs of a round, S slots, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from eagle3_core.drafter.model import DraftCache, Drafter
from eagle3_core.verifier.base import Decoding, Generated, Progressed, States
from eagle3_core.verifier.cache import SlotCache
from eagle3_core.verifier.generation import (
    DROP_FROM,
    Answer,
    Engine,
    Greedy,
    Prefilled,
    common_prefix,
    prefill,
    share_prefix,
)


class DraftHead(Protocol):
    """What the chain decoder asks of a drafter; made anew for every batch."""

    def observe(self, rows_B: Tensor, slots_Bn: Tensor, aux_BnW: Tensor) -> None:
        """Take the verifier's aux states of the tokens at `slots_Bn` of `rows_B`."""
        ...

    def draft(self, ids_BS: Tensor, known_B: Tensor, unread_B: Tensor, steps: int) -> Tensor:
        """[B, steps] candidates to follow each row's `known_B` tokens; `unread_B`: first pair it has not read yet."""
        ...

    def keep(self, rows_B: Tensor) -> None:
        """Go on with `rows_B` only."""
        ...


class ChainDrafter:
    """A `Drafter` over a batch: its cache, and the combined states g_p that its pairs wait for."""

    def __init__(self, drafter: Drafter, rows: int, slots: int) -> None:
        self.drafter = drafter
        self.cache = DraftCache.allocate(drafter, rows, slots)
        fc = drafter.weights["fc.weight"]
        self.combined_BSH = fc.new_zeros((rows, slots, drafter.config.hidden_size))

    def observe(self, rows_B: Tensor, slots_Bn: Tensor, aux_BnW: Tensor) -> None:
        """Combine and remember."""
        self.combined_BSH[rows_B[:, None], slots_Bn] = self.drafter.combine(aux_BnW)

    def draft(self, ids_BS: Tensor, known_B: Tensor, unread_B: Tensor, steps: int) -> Tensor:
        """Read the new pairs, then feed back. Shorter rows read their last pair again, which changes nothing."""
        rows_B = torch.arange(len(known_B), device=ids_BS.device)
        last_B = known_B - 2
        width = int((last_B - unread_B).max()) + 1
        pair_BW = torch.minimum(unread_B[:, None] + torch.arange(width, device=ids_BS.device), last_B[:, None])
        tokens_BW = ids_BS.gather(1, pair_BW + 1)
        out_BWH = self.drafter.layer(tokens_BW, self.combined_BSH[rows_B[:, None], pair_BW], pair_BW + 1, self.cache)
        hidden_BH = out_BWH[rows_B, last_B - unread_B]
        drafted = [self.drafter.tokens(self.drafter.logits(hidden_BH).argmax(-1))]
        for step in range(1, steps):
            position_B1 = (last_B + 1 + step)[:, None]
            hidden_BH = self.drafter.layer(drafted[-1][:, None], hidden_BH[:, None], position_B1, self.cache)[:, 0]
            drafted.append(self.drafter.tokens(self.drafter.logits(hidden_BH).argmax(-1)))
        return torch.stack(drafted, 1)

    def keep(self, rows_B: Tensor) -> None:
        """Go on with some rows."""
        self.cache, self.combined_BSH = self.cache.select(rows_B), self.combined_BSH[rows_B]


@dataclass
class Chain:
    """One prompt's answer by drafting and verifying, and how often each draft was right."""

    index: int
    ids: list[int]
    """Prompt and answer."""
    prompt_len: int
    limit: int
    """Tokens at which the answer is cut."""
    proposed: list[int]
    """[K]: rounds whose draft k had a chance: all before it were right, and the answer was not at its end."""
    accepted: list[int]
    """[K]: those of them in which draft k was right. accepted / proposed is the conditional acceptance."""
    calls: int = 0
    ended: bool = False

    @property
    def tokens(self) -> int:
        """Tokens after the first."""
        return len(self.ids) - self.prompt_len - 1

    @property
    def answer(self) -> list[int]:
        """The answer's tokens, the end-of-sequence token included if it came."""
        return self.ids[self.prompt_len :]

    def take(self, drafted: Sequence[int], verified: Sequence[int], eos_ids: frozenset[int]) -> list[int]:
        """Count one round (K drafts, the verifier's K + 1 tokens) and append what it gives; returns the new tokens."""
        self.calls += 1
        new: list[int] = []
        for k, token in enumerate(verified):
            new.append(token)
            right = k < len(drafted) and drafted[k] == token
            if k < len(drafted):
                self.proposed[k] += 1
                self.accepted[k] += right
            self.ended = token in eos_ids or len(self.answer) + len(new) >= self.limit
            if self.ended or not right:
                break
        self.ids += new
        return new


@dataclass(frozen=True)
class Measured:
    """A prompt answered with and without the drafter."""

    chain: Chain
    plain: Generated


@dataclass
class ChainDecoder:
    """Drafting and verifying for a batch of prompts that lie prefilled in `cache`."""

    engine: Engine
    head: DraftHead
    cache: SlotCache
    steps: int
    eos_ids: frozenset[int]
    chains: list[Chain]
    """One for each row of the cache, each with its first answer token."""
    ids_BS: Tensor = field(init=False)
    known_B: Tensor = field(init=False)
    unread_B: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.engine.device
        slots = max(chain.prompt_len + chain.limit for chain in self.chains) + self.steps + 1
        self.ids_BS = torch.zeros((len(self.chains), slots), dtype=torch.int64, device=device)
        for row, chain in enumerate(self.chains):
            self.ids_BS[row, : len(chain.ids)] = torch.tensor(chain.ids, device=device)
        self.known_B = torch.tensor([len(chain.ids) for chain in self.chains], device=device)
        self.unread_B = torch.zeros_like(self.known_B)

    def run(self) -> Iterator[list[Chain]]:
        """Rounds until every answer has ended; each gives the chains that did."""
        yield self._drop([chain.ended for chain in self.chains])
        while self.chains:
            self._round()
            ended = [chain.ended for chain in self.chains]
            # Dropping rows copies the caches: wait until an eighth of them have ended.
            yield self._drop(ended) if sum(ended) * DROP_FROM >= len(ended) else []

    def _round(self) -> None:
        rows_B = torch.arange(len(self.chains), device=self.engine.device)
        drafted_BK = self.head.draft(self.ids_BS, self.known_B, self.unread_B, self.steps)
        first_B = self.known_B - 1
        slots_Bn = first_B[:, None] + torch.arange(self.steps + 1, device=self.engine.device)
        ids_Bn = torch.cat([self.ids_BS.gather(1, first_B[:, None]), drafted_BK], 1)
        out = self.engine.forward(ids_Bn, slots_Bn, self.cache, states=True)
        assert out.states is not None
        self.head.observe(rows_B, slots_Bn, out.states.aux)
        drafted, verified = drafted_BK.tolist(), out.logits.argmax(-1).tolist()
        self.unread_B = first_B
        for row, chain in enumerate(self.chains):
            if not chain.ended:
                new = chain.take(drafted[row], verified[row], self.eos_ids)
                start = len(chain.ids) - len(new)
                self.ids_BS[row, start : len(chain.ids)] = torch.tensor(new, device=self.engine.device)
        self.known_B = torch.tensor([len(chain.ids) for chain in self.chains], device=self.engine.device)
        self.unread_B = torch.minimum(self.unread_B, self.known_B - 2)  # a row that ended reads its last pair again

    def _drop(self, ended: Sequence[bool]) -> list[Chain]:
        gone = [chain for chain, end in zip(self.chains, ended, strict=True) if end]
        kept = [row for row, end in enumerate(ended) if not end]
        if gone and kept:
            index = torch.tensor(kept, device=self.engine.device)
            self.cache.keep(index)
            self.head.keep(index)
            self.ids_BS, self.known_B, self.unread_B = self.ids_BS[index], self.known_B[index], self.unread_B[index]
        self.chains = [self.chains[row] for row in kept]
        return gone


def measure(
    engine: Engine,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    how: Decoding,
    *,
    num_steps: int,
    on_progress: Progressed,
) -> list[Measured]:
    """Answer `prompts` with the drafter (chains of `num_steps`) and without; results in the order of the prompts."""
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    found: dict[int, Measured] = {}
    tokens = 0
    for start in range(0, len(order), how.batch_size):
        batch = order[start : start + how.batch_size]
        for measured in _batch(engine, drafter, prompts, batch, how, num_steps):
            if isinstance(measured, Measured):
                found[measured.plain.index] = measured
            else:
                tokens += measured
            on_progress(done=len(found), tokens=tokens)
    return [found[i] for i in range(len(prompts))]


@torch.no_grad()
def _batch(
    engine: Engine,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    batch: Sequence[int],
    how: Decoding,
    num_steps: int,
) -> Iterator[Measured | int]:
    """One batch: prompts once, then plain, then drafted. Gives counts of tokens as they come, and the results."""
    asked = [prompts[i] for i in batch]
    cache = engine.cache(len(batch), len(asked[0]) + 1)
    shared = common_prefix(asked)
    prefix = share_prefix(engine, cache, asked[0][:shared], True)
    ready = prefill(engine, cache, range(len(batch)), asked, shared, True)
    greedy = Greedy(engine, cache.clone(), how, shared)
    answers = [Answer(i, list(p), len(p), how.limit(len(p))) for i, p in zip(batch, asked, strict=True)]
    plain = {answer.index: answer for answer in greedy.seat(range(len(batch)), answers, ready.next_R)}
    for ended in greedy.run_out():
        plain |= {answer.index: answer for answer in ended}
        yield len(greedy.rows)
    for ended in _decoder(engine, drafter, cache, asked, batch, how, num_steps, prefix, ready).run():
        for chain in ended:
            yield chain.tokens
            yield Measured(chain, plain[chain.index])


def _decoder(
    engine: Engine,
    drafter: Drafter,
    cache: SlotCache,
    asked: Sequence[Sequence[int]],
    batch: Sequence[int],
    how: Decoding,
    num_steps: int,
    prefix: States | None,
    ready: Prefilled,
) -> ChainDecoder:
    """A decoder that starts from prefilled prompts, whose states its drafter has seen."""
    eos_ids = frozenset(how.eos_ids)
    chains: list[Chain] = []
    for i, prompt, first in zip(batch, asked, ready.next_R.tolist(), strict=True):
        limit = how.limit(len(prompt))
        counts = [0] * num_steps
        ended = first in eos_ids or limit == 1
        chains.append(Chain(i, [*prompt, first], len(prompt), limit, counts, list(counts), ended=ended))
    slots = max(len(p) + how.limit(len(p)) for p in asked) + num_steps + 1
    head = ChainDrafter(drafter, len(batch), slots)
    for row, states in enumerate(ready.states):
        aux_TW = states.aux if prefix is None else torch.cat([prefix.aux, states.aux])
        where = torch.tensor([row], device=engine.device)
        head.observe(where, torch.arange(len(aux_TW), device=engine.device)[None], aux_TW[None])
    return ChainDecoder(engine, head, cache, num_steps, eos_ids, chains)
