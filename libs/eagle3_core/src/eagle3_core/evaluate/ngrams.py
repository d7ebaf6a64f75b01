"""Two warnings about a measured acceptance length: answers that loop, and answers that training has seen.

A looping answer repeats an 8-gram within itself; a drafter that copies scores well on it. A held-out answer whose
8-grams occur in training answers says little about new text. Both shares are reported beside the acceptance length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

N = 8


def ngrams(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """All runs of eight tokens, in order."""
    return [tuple(tokens[i : i + N]) for i in range(len(tokens) - N + 1)]


def loops(tokens: Sequence[int]) -> bool:
    """Whether an 8-gram occurs twice in `tokens` (an answer without its prompt)."""
    runs = ngrams(tokens)
    return len(set(runs)) < len(runs)


class SeenNgrams:
    """The distinct 8-grams of training answers, kept as hashes: a tenth of the memory of the tokens' tuples.

    Python's hash of a tuple of ints is the same in every process; two different 8-grams share one with chance 2^-64.
    """

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def add(self, answers: Iterable[Sequence[int]]) -> None:
        """Remember the 8-grams of `answers`."""
        for answer in answers:
            self._hashes.update(map(hash, ngrams(answer)))

    def count(self, answer: Sequence[int]) -> tuple[int, int]:
        """How many of the answer's 8-grams occur in training answers, and how many it has."""
        runs = ngrams(answer)
        return sum(hash(run) in self._hashes for run in runs), len(runs)
