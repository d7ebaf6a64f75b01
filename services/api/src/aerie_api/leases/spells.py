"""How long a stage ran: the time in which an attempt at one of its units was under way.

From its first claim to its end is another thing: between the two a job may be cancelled and taken up again a day later, be
paused, or wait for workers that serve somebody else. Estimates, bills and comparisons ask how long the work took.
"""

from __future__ import annotations

from collections.abc import Iterable

Spell = tuple[float, float | None]
"""When an attempt began and ended, in seconds since the epoch; null while it runs."""


def ran_s(spells: Iterable[Spell], until: float | None) -> float:
    """Seconds that are covered by at least one of `spells`; those that last are seen `until` then (null: not at all)."""
    total, reached = 0.0, float("-inf")
    for began, ended in sorted(spells, key=lambda spell: spell[0]):
        end = ended if ended is not None else until if until is not None else began
        total += max(0.0, end - max(began, reached))
        reached = max(reached, end)
    return total
