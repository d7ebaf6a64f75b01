"""Prompts that meet every habit of a prefill: shorter and longer than a chunk, and some that begin as the one before."""

from __future__ import annotations

import random

PROMPTS, SHORTEST, LONGEST, IN_FLIGHT, VOCAB = 50, 5, 600, 8, 320


def prompts() -> list[list[int]]:
    """Prompts from the shortest to the longest; every fifth begins with the whole of the one before it."""
    draw, made = random.Random(0), []
    for i in range(PROMPTS):
        length = SHORTEST + (LONGEST - SHORTEST) * i // (PROMPTS - 1)
        head = made[-1] if i % 5 == 4 else []
        made.append(head + [draw.randrange(3, VOCAB) for _ in range(length - len(head))])
    return made
