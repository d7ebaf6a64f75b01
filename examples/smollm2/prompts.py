"""The demo's prompts: five small tasks, drawn from a seed, with a held-out split that shares no name, number or text.

Why not a public data set: a demo that trains for four minutes must show what a drafter learns, on any machine, offline.
So the tasks are narrow and the answers short, and everything that could be memorised is kept apart: each pool of words is cut
by index and each number by its remainder modulo 5, so train, tune and test never meet. Only the wording of the templates is shared.

The wording was chosen with SmolLM2-135M-Instruct at hand: it loops when it is asked to reason in steps ("Step 1: ...") and
answers in a line or two when it is asked for one or two sentences. Loops flatter a drafter, so such wordings were dropped.

A template names its slots: `{name}` is a word of the pool `name`, `{name_b}` another word of the same pool, `{n:12-60}` a
number from that range; a slot that returns keeps its value. `draw` is deterministic and stable: a longer draw from the
same seed starts with the shorter one, and every prefix is balanced over the tasks.

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

Split = Literal["train", "tune", "test"]
Choice = TypeVar("Choice")

REMAINDERS: dict[Split, frozenset[int]] = {
    "train": frozenset({0, 1, 2}),
    "tune": frozenset({3}),
    "test": frozenset({4}),
}
"""The remainders modulo 5, of pool indices and of numbers alike, that belong to a split."""

TRIES_PER_PROMPT = 200
"""Draws that may repeat an earlier prompt before a task is declared exhausted."""


class Message(TypedDict):
    role: str
    content: str


class Prompt(TypedDict):
    """One line of the output: a conversation that waits for the assistant."""

    id: str
    task: str
    messages: list[Message]


class PoolExhausted(ValueError):
    """A task cannot produce as many distinct prompts as were asked for."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(phrase.strip() for phrase in text.split(","))


POOLS: dict[str, tuple[str, ...]] = {
    "name": _words(
        "Ada Boris Clara Dennis Emma Farid Gloria Henry Irene Jack Kira Leon Monica Nils Olga Peter Rita Simon Tanya Umar "
        "Vivian Walter Yara Zeno Alice Ben Cora David Edith Frank Grace Harold Ivy Julian Katya Louis Martha Norman Opal "
        "Paul Ruth Steven Thelma Ursula Vincent Wendy Xavier Yvonne Zoe Arthur Bertha Conrad Dora Edgar Fiona"
    ),
    "item": _words(
        "apples pencils stamps marbles cookies shells books candles buttons oranges coins flowers eggs tickets stones "
        "lemons postcards beads peaches magnets bottles crayons plums balloons onions spoons mugs pears stickers bricks "
        "carrots towels melons brushes walnuts"
    ),
    "city": _words(
        "Lisbon Denver Oslo Nairobi Kyoto Dublin Vienna Perth Austin Cairo Lyon Manila Turin Boston Prague Lima Seoul "
        "Porto Zurich Leeds Toronto Riga Hanoi Bristol Madrid Tunis Geneva Delhi Naples Quebec Athens Berlin Chicago Dakar Milan"
    ),
    "job": _words(
        "nurse baker pilot carpenter teacher plumber chemist farmer painter librarian driver dentist gardener tailor waiter "
        "welder cook lawyer sailor potter barber clerk judge singer doctor"
    ),
    "animal": _words(
        "fox otter heron badger turtle owl goat salmon beaver lizard crane rabbit wolf sparrow moose hedgehog seal pony hen swan"
    ),
    "place": _words(
        "harbor library market bakery museum station garden school workshop theater hospital bridge factory castle stadium "
        "airport chapel farm cinema gallery office lighthouse warehouse clinic mill"
    ),
    "color": _words("red blue green yellow white black navy purple gray brown pink silver golden violet beige"),
    "when": _phrases(
        "on Monday, in the morning, after lunch, every Friday, in May, on Tuesday, at noon, before dinner, every Sunday, "
        "in winter, on Thursday, at night, after school, every Saturday, in June, on Wednesday, at sunset, before work, "
        "every week, in summer, on Sunday, in the evening, after breakfast, every day, in autumn"
    ),
    "object": _words(
        "report invoice parcel contract photo map laptop recipe schedule letter budget poster survey menu form file sample "
        "drawing manual receipt draft badge logo diary ladder"
    ),
    "does": _phrases(
        "walks to the, cleans the, visits the, leaves the, paints the, opens the, draws the, closes the, enters the, "
        "guards the, photographs the, repairs the, admires the, describes the, drives to the"
    ),
    "class": _words("Book Car Student Movie House Order Song Recipe Player Hotel Ticket Device Pet Course Invoice"),
    "field": _words("title year price weight size speed rating height length owner number city status email score"),
    "measure": _phrases(
        "the sum, the count, the largest, the smallest, the average, the product, a list, the first, the last, the median, "
        "the squares, the range, a sorted list, a set, the mean"
    ),
    "function": _phrases(
        "counts the vowels in a string, reverses a string, checks whether a string is a palindrome, counts the words in a sentence, "
        "removes all spaces from a string, returns the longest word in a sentence, converts a string to upper case, "
        "counts how often a letter occurs in a string, returns the first letter of every word, removes duplicates from a list, "
        "checks whether two strings are anagrams, replaces every vowel with a star, counts the digits in a string, "
        "joins a list of words with commas, swaps the case of every letter, returns the shortest word in a list, "
        "checks whether a string starts with a capital letter, repeats a string n times, returns the middle character of a string, "
        "removes punctuation from a string, converts Celsius to Fahrenheit, computes the area of a circle, "
        "computes the factorial of n, returns the nth Fibonacci number, checks whether a number is prime, "
        "converts hours to minutes, computes the greatest common divisor of two numbers, swaps the keys and values of a dictionary, "
        "flattens a list of lists, merges two sorted lists, computes the perimeter of a rectangle, rotates a list by one place, "
        "raises a number to a power, checks whether a year is a leap year, returns the last element of a list"
    ),
}
"""Every word that a slot can hold. The index of a word decides its split; no word stands in two pools."""

ARITH = (
    "{name} has {a:12-60} {item}. {name} buys {b:2-12} bags with {c:3-14} {item} in each bag. How many {item} does {name} have now?",
    "A box holds {a:4-24} {item}. {name} fills {b:3-14} boxes and has {c:2-12} {item} left over. How many {item} did {name} start with?",
    "One pack of {item} costs {a:2-14} dollars. {name} buys {b:3-14} packs and pays with {c:130-200} dollars. How much change does {name} get?",
    "{name} collects {a:5-30} {item} every day for {b:3-14} days, and {name_b} collects {c:20-90} {item} in total. How many {item} do they have together?",
    "{name} shares {a:40-160} {item} between {b:2-12} friends. How many {item} does each friend get, and how many are left?",
)
ARITH_ENDINGS = ("Answer in one short sentence.", "Answer in two short sentences.")

SENTENCES = (
    "{name} {does} {place} in {city} {when} and meets {name_b} at the {place_b}.",
    "{name} sends a {color} {object} to {name_b} {when} and waits at the {place} of {city}.",
    "The {job} {does} {place} {when}, and {name} brings the {object} to {city}.",
    "{name} needs the {color} {object} {when}, but {name_b} still looks for it at the {place}.",
)
REWRITES = (
    "Rewrite this sentence in the past tense: {}",
    "Correct the spelling and punctuation of this sentence: {}",
    "Rewrite this sentence so that it is easy to read: {}",
)

RECORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{name} is a {a:21-70} year old {job} who lives in {city}.", ("name", "age", "job", "city")),
    (
        "{name} ordered {a:2-40} {color} {item} for {b:3-90} dollars.",
        ("customer", "item", "color", "quantity", "price"),
    ),
    ("{name} sent a {color} {object} to {name_b} in {city}.", ("sender", "receiver", "object", "color", "city")),
    ("{name} booked a train from {city} to {city_b} for {a:2-14} people.", ("name", "from", "to", "people")),
    ("The {place} in {city} sold {a:10-99} {item} to {name}.", ("seller", "city", "quantity", "item", "buyer")),
)

CODE = (
    "Write a Python function that {function}. Write only the code.",
    "Write a one-line Python function that {function}.",
    "Write a one-line Python function that returns {measure} of the numbers in a list that are greater than {a:2-99}.",
    "Write a one-line Python function that returns {measure} of the numbers in a list that are divisible by {a:2-30}.",
    "Write a Python class {class} with the fields {field}, {field_b} and {field_c}. Write only the code.",
)

TEXTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "The {place} of {city} was built in {a:1900-1999}. {name}, a {job}, designed it. It has {b:11-95} rooms and a {color} door.",
        (
            "Who designed the {place} of {city}?",
            "When was the {place} of {city} built, and who designed it?",
            "How many rooms does the {place} of {city} have?",
        ),
    ),
    (
        "A {color} {animal} lives near the {place} of {city}. {name} brings it {item} {when}. Last week {name_b} came with {a:11-95} {item}.",
        (
            "Where does the {color} {animal} live?",
            "Who came last week, and with how many {item}?",
            "What does {name} bring to the {color} {animal}?",
        ),
    ),
    (
        "{name} works at the {place} in {city} and earns {a:11-95} dollars an hour. {name_b}, a {job}, works at the {place_b}.",
        (
            "Where does {name} work, and how much does {name} earn?",
            "Where does {name_b} work?",
            "Who works at the {place} in {city}?",
        ),
    ),
)


class Draw:
    """A stream of filled templates over the words and numbers of one split."""

    def __init__(self, split: Split, seed: str) -> None:
        self._rng = random.Random(seed)
        self._remainders = REMAINDERS[split]
        self._pools = {name: words_of(name, split) for name in POOLS}

    def choose(self, options: tuple[Choice, ...]) -> Choice:
        return self._rng.choice(options)

    def some(self, options: tuple[str, ...]) -> tuple[str, ...]:
        """All options in their order, or all but one in any order: half the draws each."""
        if self._rng.random() < 0.5:
            return options
        return tuple(self._rng.sample(options, len(options) - 1))

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
        free = [word for word in self._pools[slot.partition("_")[0]] if word not in taken.values()]
        return self._rng.choice(free)

    def _number(self, span: str) -> str:
        low, high = map(int, span.split("-"))
        return str(self._rng.choice([n for n in range(low, high + 1) if n % 5 in self._remainders]))


def words_of(pool: str, split: Split) -> tuple[str, ...]:
    """The part of a pool that belongs to a split."""
    return tuple(word for index, word in enumerate(POOLS[pool]) if index % 5 in REMAINDERS[split])


def _arith(draw: Draw) -> str:
    return f"{draw.fill(draw.choose(ARITH))} {draw.choose(ARITH_ENDINGS)}"


def _rewrite(draw: Draw) -> str:
    return draw.choose(REWRITES).format(draw.fill(draw.choose(SENTENCES)))


def _extract(draw: Draw) -> str:
    sentence, keys = draw.choose(RECORDS)
    form = json.dumps(dict.fromkeys(draw.some(keys), ""))
    return f"Text: {draw.fill(sentence)}\nFill in this JSON from the text: {form}"


def _code(draw: Draw) -> str:
    return draw.fill(draw.choose(CODE))


def _answer(draw: Draw) -> str:
    text, questions = draw.choose(TEXTS)
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
    while misses < TRIES_PER_PROMPT:
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
        raise PoolExhausted(
            f"task {task!r} has only about {turn} distinct prompts in split {split!r}: ask for fewer per task"
        )
    return Prompt(id=f"{split}-{task}-{turn:04d}", task=task, messages=[Message(role="user", content=text)])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draw the demo's prompts as JSON lines.")
    parser.add_argument("--split", choices=get_args(Split), required=True)
    parser.add_argument("--per-task", type=int, required=True, help="prompts of each of the five tasks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    try:
        prompts = draw_prompts(args.split, args.per_task, args.seed)
    except PoolExhausted as error:
        print(f"prompts.py: {error}", file=sys.stderr)
        return 2
    args.out.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
