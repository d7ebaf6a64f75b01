"""What there is to know about finished drafters."""

from __future__ import annotations

from aerie_api.db import Database
from aerie_api.drafters.repository import DrafterRepository
from aerie_api.drafters.schemas import AcceptanceLength, Drafter, DrafterList


class DrafterService:
    """Reads drafters."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def list(self, tenant: str, limit: int, after: str | None) -> DrafterList:
        """Up to `limit` drafters, newest first."""
        with self._db.read() as session:
            rows = DrafterRepository(session, tenant).newest_first(limit + 1, after)
        data = [
            Drafter(
                name=row.name, job=row.job_id, digest=row.digest, verdict="pass" if row.verdict == "pass" else "fail",
                acceptance_length=AcceptanceLength.model_validate(row.figures["acceptance_length"]),
                acceptance_length_served=row.figures.get("acceptance_length_served"),
                created_at=row.created_at,
            )
            for row in rows[:limit]
        ]  # fmt: skip
        return DrafterList(
            data=data, has_more=len(rows) > limit,
            first_id=data[0].name if data else None, last_id=data[-1].name if data else None,
        )  # fmt: skip
