"""The demo's prompts: five small tasks, drawn from a seed, with a held-out split whose names, numbers and texts are new.

Why not a public data set: a demo that trains for four minutes must show what a drafter learns, on any machine, offline.
So the tasks are narrow and the answers short. What could be memorised is kept apart: the words of each pool are dealt to
train, tune and test by their index, and numbers by their remainder modulo 5, so no person, town, thing, number or text of
one split occurs in another. The wording itself, weekdays, colors and kinds of building included, is common to all splits.

Words and templates stand in `wording.py`. `draw_prompts` is deterministic and stable: a longer draw from the same seed
starts with the shorter one, and every prefix is balanced over the tasks.

    python examples/smollm2/prompts.py --split train --per-task 100 --seed 0 --out train.jsonl
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Formatter
from typing import Literal, TypedDict, TypeVar, get_args

from wording import ANSWER, ARITH, ARITH_ENDINGS, CODE, COMMON, EXTRACT, POOLS, REWRITE

Split = Literal["train", "tune", "test"]
Choice = TypeVar("Choice")

REMAINDERS: dict[Split, frozenset[int]] = {
    "train": frozenset({0, 1, 2}),
    "tune": frozenset({3}),
    "test": frozenset({4}),
}
"""The remainders modulo 5, of pool indices and of numbers alike, that belong to a split."""

MAX_MISSES = 200
"""Draws in a row that give nothing new before a task counts as exhausted."""


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


class Prompt(TypedDict):
    """One line of the output: a conversation that waits for the assistant."""

    id: str
    task: str
    messages: list[Message]


class PoolExhausted(ValueError):
    """A task cannot produce as many distinct prompts as were asked for."""


class Draw:
    """A stream of filled templates over the words and numbers of one split."""

    def __init__(self, split: Split, seed: str) -> None:
        self._rng = random.Random(seed)
        self._remainders = REMAINDERS[split]
        self._words = COMMON | {pool: words_of(pool, split) for pool in POOLS}

    def choose(self, options: tuple[Choice, ...]) -> Choice:
        """One of the options."""
        return self._rng.choice(options)

    def fill(self, template: str) -> str:
        """The template with every slot filled; a slot that returns keeps its value."""
        values: dict[str, str] = {}
        parts: list[str] = []
        for literal, slot, span, _ in Formatter().parse(template):
            parts.append(literal)
            if slot is None:
                continue
            if slot not in values:
                values[slot] = self._number(span) if span else self._word(slot, values)
            parts.append(values[slot])
        return "".join(parts)

    def _word(self, slot: str, taken: dict[str, str]) -> str:
        pool = self._words[slot.partition("_")[0]]
        return self._rng.choice([word for word in pool if word not in taken.values()])

    def _number(self, span: str | None) -> str:
        low, high = map(int, (span or "").split("-"))
        return str(self._rng.choice([n for n in range(low, high + 1) if n % 5 in self._remainders]))


def words_of(pool: str, split: Split) -> tuple[str, ...]:
    """The part of a pool that belongs to a split."""
    return tuple(word for index, word in enumerate(POOLS[pool]) if index % 5 in REMAINDERS[split])


def _arith(draw: Draw) -> str:
    return f"{draw.fill(draw.choose(ARITH))} {draw.choose(ARITH_ENDINGS)}"


def _rewrite(draw: Draw) -> str:
    return draw.fill(draw.choose(REWRITE))


def _extract(draw: Draw) -> str:
    text, keys = draw.choose(EXTRACT)
    form = json.dumps(dict.fromkeys(keys, ""))
    return f"Text: {draw.fill(text)}\nFill in this JSON from the text: {form}"


def _code(draw: Draw) -> str:
    return draw.fill(draw.choose(CODE))


def _answer(draw: Draw) -> str:
    text, questions = draw.choose(ANSWER)
    return draw.fill(f"Text: {text}\nQuestion: {draw.choose(questions)} Answer in a full sentence.")


TASKS: dict[str, Callable[[Draw], str]] = {
    "arith": _arith,
    "rewrite": _rewrite,
    "json": _extract,
    "code": _code,
    "qa": _answer,
}


def distinct(task: str, split: Split, seed: int = 0) -> Iterator[str]:
    """Different prompts of one task, as many as its pools give; ends when new ones have become rare."""
    draw, seen, misses = Draw(split, f"{task}/{split}/{seed}"), set[str](), 0
    while misses < MAX_MISSES:
        text = TASKS[task](draw)
        if text in seen:
            misses += 1
            continue
        misses = 0
        seen.add(text)
        yield text


def draw_prompts(split: Split, per_task: int, seed: int = 0) -> list[Prompt]:
    """`per_task` distinct prompts of every task, the tasks taking turns.

    Raises PoolExhausted when a task has fewer.
    """
    streams = {task: distinct(task, split, seed) for task in TASKS}
    return [_prompt(split, task, turn, streams[task]) for turn in range(per_task) for task in TASKS]


def _prompt(split: Split, task: str, turn: int, stream: Iterator[str]) -> Prompt:
    text = next(stream, None)
    if text is None:
        raise PoolExhausted(f"task {task!r} has about {turn} distinct prompts in split {split!r}: ask for fewer")
    return Prompt(id=f"{split}-{task}-{turn:04d}", task=task, messages=[Message(role="user", content=text)])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draw the demo's prompts as JSON lines.")
    parser.add_argument("--split", choices=get_args(Split), required=True)
    parser.add_argument("--per-task", type=int, required=True, help="prompts of each of the five tasks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> int:
    """Draw the prompts and write them; 2 when the pools are too small for the request."""
    args = _arguments()
    try:
        prompts = draw_prompts(args.split, args.per_task, args.seed)
    except PoolExhausted as error:
        sys.stderr.write(f"prompts.py: {error}\n")
        return 2
    args.out.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
