"""Greedy answers for many prompts at once: rows that end are refilled, so the batch stays full.

A step costs about the same for 60 live rows as for 64, so a row whose answer ended is dead weight until something
takes its place: once a sixteenth of the rows is free they get new prompts, and when no prompts are left the rows that
ended are dropped as soon as they are an eighth. The longest common prefix of the prompts (the system turn) is computed
once. The last token of an answer runs through the model too, so N tokens have N states.

Shapes: R rows, n tokens a row, T tokens of one sequence, H hidden size, P tokens of the shared prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from eagle3_core.verifier.base import Decoding, Generated, Progressed, States
from eagle3_core.verifier.cache import SlotCache

PREFILL_TOKENS = 8192
"""Padded tokens of one prefill pass: bounds the memory of its activations."""
REFILL_FROM, DROP_FROM = 16, 8
"""Rows are refilled when 1/16 of them are free, dropped when 1/8 are and no prompt waits."""


@dataclass(frozen=True)
class Pass:
    """What one pass gives: logits of the asked tokens, states of all of them."""

    logits: Tensor
    """[R, V] of each row's asked token, or [R, n, V] of all."""
    states: States | None
    """[R, n, ...] of all tokens; None unless asked for."""


class Engine(Protocol):
    """What decoding needs of a loaded verifier."""

    device: torch.device

    def cache(self, rows: int, capacity: int) -> SlotCache:
        """An empty cache."""
        ...

    def forward(
        self,
        ids_Rn: Tensor,
        slots_Rn: Tensor,
        cache: SlotCache,
        *,
        rows_R: Tensor | None = None,
        last_R: Tensor | None = None,
        states: bool = False,
    ) -> Pass:
        """Run tokens at their slots; logits of token `last_R` of each row, or of all."""
        ...


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all prompts begin with; at least one token of each stays outside."""
    first, last = min(map(list, prompts)), max(map(list, prompts))  # in lexical order: what these two share, all share
    limit = min(map(len, prompts)) - 1
    return next((i for i in range(limit) if first[i] != last[i]), limit)


@dataclass
class Prefilled:
    """Prompts whose keys and values lie in a cache: what a decoder starts from."""

    next_R: Tensor
    """[R] int64: the first token of each answer."""
    states: list[States]
    """Per prompt: those of its tokens behind the shared prefix, [T - P, ...]; empty unless asked for."""


def share_prefix(engine: Engine, cache: SlotCache, prefix: Sequence[int], states: bool) -> States | None:
    """Compute `prefix` once and give it to every row of `cache`; its states [P, ...] if asked for and it is not empty."""
    if not prefix:
        return None
    ids = torch.tensor([list(prefix)], device=engine.device)
    slots = torch.arange(len(prefix), device=engine.device)[None]
    row = torch.zeros(1, dtype=torch.int64, device=engine.device)
    done = engine.forward(ids, slots, cache, rows_R=row, last_R=row + len(prefix) - 1, states=states)
    cache.share(0, len(prefix))
    return None if done.states is None else done.states.row(0)


def prefill(
    engine: Engine, cache: SlotCache, rows: Sequence[int], prompts: Sequence[Sequence[int]], shared: int, states: bool
) -> Prefilled:
    """Run `prompts` behind their first `shared` tokens, which `cache` holds, in its `rows`; padded on the right."""
    done = Prefilled(torch.empty(len(prompts), dtype=torch.int64, device=engine.device), [])
    longest = max(map(len, prompts)) - shared
    together = max(1, PREFILL_TOKENS // longest)
    for start in range(0, len(prompts), together):
        part = [list(p[shared:]) for p in prompts[start : start + together]]
        width = max(map(len, part))
        ids = torch.tensor([p + [0] * (width - len(p)) for p in part], device=engine.device)
        slots = torch.arange(shared, shared + width, device=engine.device).expand(len(part), -1)
        last = torch.tensor([len(p) - 1 for p in part], device=engine.device)
        where = torch.tensor(list(rows[start : start + together]), device=engine.device)
        out = engine.forward(ids, slots, cache, rows_R=where, last_R=last, states=states)
        done.next_R[start : start + len(part)] = out.logits.argmax(-1)
        if out.states is not None:
            done.states += [out.states.row(r, len(p)) for r, p in enumerate(part)]
    return done


@dataclass
class Answer:
    """One answer in the making."""

    index: int
    ids: list[int]
    prompt_len: int
    limit: int
    """Tokens at which it is cut."""
    complete: bool = False
    """Whether its newest token is its last; that token's state may still be missing."""
    states: list[States] = field(default_factory=list[States])

    def done(self, ended: bool) -> Generated:
        """This answer, finished."""
        states = States.cat(self.states) if self.states else None
        return Generated(self.index, self.ids, self.prompt_len, ended, states)


class Greedy:
    """Greedy decoding of rows that come and go. `step` is one token for every row."""

    def __init__(self, engine: Engine, cache: SlotCache, how: Decoding, shared: int) -> None:
        """`shared`: slots that all rows have in common."""
        self.engine, self.cache, self.how, self.shared = engine, cache, how, shared
        self.eos_ids = frozenset(how.eos_ids)
        self.rows: list[Answer | None] = [None] * cache.rows
        self.next_R = torch.zeros(cache.rows, dtype=torch.int64, device=engine.device)
        self.slot_R = torch.zeros_like(self.next_R)
        self.tokens = 0
        """Tokens computed so far, prompts included."""

    @property
    def free(self) -> list[int]:
        """Rows that hold no answer."""
        return [r for r, answer in enumerate(self.rows) if answer is None]

    def seat(self, rows: Sequence[int], answers: Sequence[Answer], first_B: Tensor) -> list[Generated]:
        """Let `answers`, whose prompts the cache holds in `rows`, start with `first_B`; gives those that end at once."""
        index = torch.tensor(list(rows), device=self.engine.device)
        self.next_R[index] = first_B
        self.slot_R[index] = torch.tensor([a.prompt_len for a in answers], device=self.engine.device)
        ended: list[Generated] = []
        for row, answer, token in zip(rows, answers, first_B.tolist(), strict=True):
            self.rows[row] = answer
            ended += self._extend(row, answer, token)
        return ended

    def _extend(self, row: int, answer: Answer, token: int) -> list[Generated]:
        answer.ids.append(token)
        stop = token in self.eos_ids
        answer.complete = stop or len(answer.ids) - answer.prompt_len >= answer.limit
        return self._leave(row, answer) if answer.complete and not self.how.keep_states else []

    def _leave(self, row: int, answer: Answer) -> list[Generated]:
        self.rows[row] = None
        self.slot_R[row] = self.shared  # a free row still computes; it may touch nothing that is shared
        return [answer.done(answer.ids[-1] in self.eos_ids)]

    def step(self) -> list[Generated]:
        """Run every row's newest token, take its state, append the next token; gives the answers that ended."""
        out = self.engine.forward(self.next_R[:, None], self.slot_R[:, None], self.cache, states=self.how.keep_states)
        self.next_R = out.logits[:, -1].argmax(-1)
        self.slot_R = self.slot_R + 1
        states = None if out.states is None else out.states.stored()
        ended: list[Generated] = []
        for row, (answer, token) in enumerate(zip(list(self.rows), self.next_R.tolist(), strict=True)):
            if answer is None:
                self.slot_R[row] = self.shared
                continue
            self.tokens += 1
            if states is not None:
                answer.states.append(states.row(row))
            ended += self._leave(row, answer) if answer.complete else self._extend(row, answer, token)
        return ended

    def drop_free(self) -> None:
        """Give up the rows that hold no answer."""
        kept = [r for r, answer in enumerate(self.rows) if answer is not None]
        index = torch.tensor(kept, dtype=torch.int64, device=self.engine.device)
        self.cache.keep(index)
        self.next_R, self.slot_R = self.next_R[index], self.slot_R[index]
        self.rows = [self.rows[r] for r in kept]

    def run_out(self) -> Iterator[list[Generated]]:
        """Steps until no row holds an answer; each gives those that ended."""
        while (free := len(self.free)) < len(self.rows):
            if free * DROP_FROM >= len(self.rows):
                self.drop_free()
            yield self.step()


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], how: Decoding, on_progress: Progressed
) -> Iterator[Generated]:
    """Greedy answers to `prompts`, each yielded when it is finished; long prompts begin, so that like runs with like."""
    finished = 0
    for greedy, ended in _rounds(engine, prompts, how) if prompts else ():
        finished += len(ended)
        on_progress(done=finished, tokens=greedy.tokens)
        yield from ended


def _rounds(
    engine: Engine, prompts: Sequence[Sequence[int]], how: Decoding
) -> Iterator[tuple[Greedy, list[Generated]]]:
    """Prefills and steps, each with the answers that it ended."""
    queue = deque(sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i)))
    cache = engine.cache(min(how.batch_size, len(prompts)), len(prompts[queue[0]]) + 1)
    greedy = Greedy(engine, cache, how, common_prefix(prompts))
    head = share_prefix(engine, cache, prompts[0][: greedy.shared], how.keep_states)
    heads = [] if head is None else [head.stored()]
    while queue:
        free = greedy.free
        if len(free) * REFILL_FROM >= len(greedy.rows):
            chosen = [queue.popleft() for _ in range(min(len(free), len(queue)))]
            yield greedy, _admit(greedy, free[: len(chosen)], chosen, prompts, heads)
        else:
            yield greedy, greedy.step()
    for ended in greedy.run_out():
        yield greedy, ended


def _admit(
    greedy: Greedy, rows: Sequence[int], chosen: Sequence[int], prompts: Sequence[Sequence[int]], heads: list[States]
) -> list[Generated]:
    """Run the prompts of `chosen` and seat them in `rows`. `heads`: states of the shared prefix, if any."""
    asked = [prompts[i] for i in chosen]
    ready = prefill(greedy.engine, greedy.cache, rows, asked, greedy.shared, greedy.how.keep_states)
    answers = [Answer(i, list(prompts[i]), len(prompts[i]), greedy.how.limit(len(prompts[i]))) for i in chosen]
    for answer, states in zip(answers, ready.states, strict=False):  # no states unless they are kept
        answer.states = [*heads, states.stored()]
    greedy.tokens += sum(len(p) - greedy.shared for p in asked)
    return greedy.seat(rows, answers, ready.next_R)
