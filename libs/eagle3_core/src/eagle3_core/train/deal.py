"""Work dealt to hands as evenly as it goes: a step takes as long as the rank that was dealt most.

Dealing the heaviest first to the lightest hand (LPT; Graham, Bounds on Multiprocessing Timing Anomalies, 1969) leaves a
step of a dozen samples several percent uneven. Exchanging a sample or two for some of another hand mends most of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

WORTH = 1e-4
"""An exchange must lighten the heavier of its two hands by this share."""
FEW = 16


def dealt(samples: Sequence[int], hands: int, work: Callable[[int], float]) -> list[list[int]]:
    """`samples` in `hands` lists of about the same sum of `work`, each in the given order; always the same for the same."""
    place = {i: n for n, i in enumerate(samples)}
    lists: list[list[int]] = [[] for _ in range(hands)]
    total = [0.0] * hands
    for i in sorted(samples, key=lambda i: (-work(i), place[i])):
        hand = min(range(hands), key=lambda h: (total[h], h))
        lists[hand].append(i)
        total[hand] += work(i)
    for _ in range(4 * len(samples)):
        if not _exchanged(lists, work):
            break
    return [sorted(hand, key=place.__getitem__) for hand in lists]


def _exchanged(lists: list[list[int]], work: Callable[[int], float]) -> bool:
    """Let the heaviest hand exchange with the lightest one that it gains from; whether there was one."""
    loads = [sum(work(i) for i in hand) for hand in lists]
    order = sorted(range(len(lists)), key=lambda h: (loads[h], h))
    heavy = order[-1]
    for light in order[:-1]:
        gap = loads[heavy] - loads[light]
        gives, takes = _handfuls(lists[heavy]), _handfuls(lists[light])
        given, taken = (np.array([sum(work(i) for i in some) for some in few]) for few in (gives, takes))
        left = np.abs(gap - 2 * (given[:, None] - taken[None, :]))
        if left.min() >= gap - 2 * WORTH * loads[heavy]:
            continue
        give, take = (few[n] for few, n in zip((gives, takes), divmod(int(left.argmin()), len(takes)), strict=True))
        lists[heavy] = [i for i in lists[heavy] if i not in give] + list(take)
        lists[light] = [i for i in lists[light] if i not in take] + list(give)
        return True
    return False


def _handfuls(hand: Sequence[int]) -> list[tuple[int, ...]]:
    """What a hand may give at once: nothing, a sample, and two where it holds so few that one is too coarse."""
    sizes = (0, 1, 2) if len(hand) <= FEW else (0, 1)
    return [some for size in sizes for some in combinations(hand, size)]
