"""Ends attempts that still give signs of life and yet do not get on.

A heartbeat says that the worker lives, not that its child does anything: a deadlocked collective or a hung file system
beats for ever. What counts as getting on is a new progress or a new value of a curve. How long a unit may stand still
depends on its stage, because loading a large verifier or compiling a kernel is one long step, and on the attempt itself:
one whose longest step so far took an hour is given five before it counts as stuck.

The attempt is ended here; its worker learns at the next heartbeat that the lease is gone and kills the child's whole
process group, which is all that helps against a process that hangs.
"""

from __future__ import annotations

from aerie_api.tables import Unit
from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import StageName
from eagle3_core.jobs.wire import Heartbeat

MINUTE_S = 60.0
PATIENCE_S: dict[StageName, float] = {
    "prepare": 30 * MINUTE_S,
    "canary": 60 * MINUTE_S,
    "generate": 60 * MINUTE_S,
    "extract": 60 * MINUTE_S,
    "vocab": 30 * MINUTE_S,
    "train": 60 * MINUTE_S,
    "evaluate": 60 * MINUTE_S,
    "package": 30 * MINUTE_S,
}
"""How long a unit of each stage may stand still. An hour where a verifier of hundreds of gigabytes may be loaded."""
STEPS = 5.0
"""How many times its own longest step an attempt may stand still."""


class Stuck(AerieError):
    """The unit gave signs of life but did not get on."""

    code, status, retryable = "unit.stuck", 500, True


def note_move(unit: Unit, beat: Heartbeat, now: float) -> None:
    """Remember whether `unit` got on, before its new progress is stored."""
    progress = beat.progress
    old = unit.progress or {}
    if not beat.metrics and (
        progress is None or (progress.done, progress.total) == (old.get("done"), old.get("total"))
    ):
        return
    step_s = now - (unit.moved_at if unit.moved_at is not None else now)
    unit.longest_step_s = max(unit.longest_step_s or 0.0, step_s)
    unit.moved_at = now


def least_patience_s(factor: float) -> float:
    """The shortest time after which any unit can be stuck."""
    return factor * min(PATIENCE_S.values())


def stuck(unit: Unit, stage: StageName, factor: float, now: float) -> Stuck | None:
    """Why the running `unit` is to be ended, if it is. `factor` scales every stage's patience."""
    if unit.moved_at is None:
        return None
    still_s = now - unit.moved_at
    patience_s = max(factor * PATIENCE_S[stage], STEPS * (unit.longest_step_s or 0.0))
    if still_s <= patience_s:
        return None
    return Stuck(
        f"{unit.stage} unit {unit.index} has not got on for {still_s / MINUTE_S:.0f} min on worker {unit.worker_id}; "
        f"{patience_s / MINUTE_S:.0f} min are allowed",
        remedy="see the unit's log for where it hung; where single steps take longer, raise AERIE_STUCK_FACTOR",
    )
