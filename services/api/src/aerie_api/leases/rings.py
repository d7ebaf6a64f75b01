"""All SQL about which units the doorbell must be rung for. A unit's `rung_at` is null while its ring is still owed."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, and_, func, select, update
from sqlalchemy.orm import Session

from aerie_api.tables import Unit
from eagle3_core.jobs.states import UnitState

_OWED = and_(Unit.state == UnitState.QUEUED, Unit.rung_at.is_(None))


class RingRepository:
    """Rings owed and rings given, in one transaction."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def any_due(self, now: float) -> bool:
        """Whether a ring is owed for a unit that may be claimed."""
        return self.session.scalar(select(Unit.id).where(_OWED, Unit.not_before <= now).limit(1)) is not None

    def next_due(self, now: float) -> float | None:
        """When the next unit that waits will be owed a ring."""
        return self.session.scalar(select(func.min(Unit.not_before)).where(_OWED, Unit.not_before > now))

    def mark_due(self, now: float, limit: int) -> list[tuple[str, str]]:
        """Take up to `limit` owed rings, the longest claimable first, as (unit, queue). No two callers get the same."""
        due = (
            select(Unit.id)
            .where(_OWED, Unit.not_before <= now)
            .order_by(Unit.not_before, Unit.job_number, Unit.position, Unit.index)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        taken = self.session.execute(
            update(Unit)
            .where(Unit.id.in_(due))
            .values(rung_at=now)
            .returning(Unit.id, Unit.queue)
            .execution_options(synchronize_session=False)
        )
        return [(unit, queue) for unit, queue in taken]

    def unmark(self, unit_ids: Sequence[str]) -> None:
        """Owe rings again."""
        self._owe(Unit.id.in_(unit_ids))

    def unheard(self, before: float) -> dict[str, int]:
        """How many units of each queue were rung for before `before` and are still not claimed."""
        counts = select(Unit.queue, func.count()).where(*_unheard(before)).group_by(Unit.queue)
        return {queue: count for queue, count in self.session.execute(counts)}

    def unmark_oldest(self, queue: str, before: float, count: int) -> None:
        """Owe rings again for `count` unheard units of `queue`."""
        oldest = select(Unit.id).where(*_unheard(before), Unit.queue == queue).order_by(Unit.rung_at).limit(count)
        self._owe(Unit.id.in_(oldest.with_for_update(skip_locked=True)))

    def _owe(self, which: ColumnElement[bool]) -> None:
        self.session.execute(
            update(Unit)
            .where(which, Unit.state == UnitState.QUEUED)
            .values(rung_at=None)
            .execution_options(synchronize_session=False)
        )


def _unheard(before: float) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return Unit.state == UnitState.QUEUED, Unit.rung_at < before
