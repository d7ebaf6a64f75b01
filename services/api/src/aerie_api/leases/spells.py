"""How long a stage ran: the time in which an attempt at one of its units was under way.

That is less than the time from its first claim to its end: in between, the job may have been cancelled and retried a day
later, been paused, or waited for workers that served another job. Estimates and comparisons need the time that the work took.
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
