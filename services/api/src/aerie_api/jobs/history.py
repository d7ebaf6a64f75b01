"""What a job leaves behind while it runs: events for people, log lines, curves. All SQL about the three.

Events and lines are numbered per job, so that a reader asks for what came after the last it has seen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session

from aerie_api.db import tell, upsert
from aerie_api.tables import Event, Job, LogRow, MetricRow, Unit
from eagle3_core.jobs.wire import LogLine, Metric, sayable

MAX_LINES = 1000
MAX_METRICS = 5000
MAX_LINE_CHARS = 4096
MAX_NAME_CHARS = 128
MAX_STEP = 1 << 53

Level = Literal["info", "warning", "error"]


class History:
    """Events, logs and metrics, in one transaction. The caller has found the job within its tenant."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def event(self, job: Job, at: float, kind: str, message: str, level: Level = "info", **data: Any) -> None:
        """Add an event to `job`; counts as a change of the job."""
        job.event_seq += 1
        job.version += 1
        said = sayable(message[:MAX_LINE_CHARS])
        self.session.add(
            Event(
                job_id=job.id,
                tenant=job.tenant,
                seq=job.event_seq,
                at=at,
                type=kind,
                level=level,
                message=said,
                data=sayable(data),
            )
        )
        tell(self.session, "news")

    def log(self, job: Job, unit: Unit, lines: Sequence[LogLine], now: float) -> None:
        """Add a unit's lines: the newest `MAX_LINES`, each cut at `MAX_LINE_CHARS`; what is left out is said."""
        kept = list(lines[-MAX_LINES:])
        if dropped := len(lines) - len(kept):
            text = f"{dropped} lines left out: a report carries at most {MAX_LINES}"
            kept.insert(0, LogLine(at=now, level="warning", text=text))
        for line in kept:
            job.log_seq += 1
            text = line.text if len(line.text) <= MAX_LINE_CHARS else line.text[: MAX_LINE_CHARS - 1] + "…"
            at = line.at if math.isfinite(line.at) else now
            self.session.add(
                LogRow(
                    job_id=job.id, tenant=job.tenant, seq=job.log_seq, stage=unit.stage, unit=unit.index, attempt=unit.attempt, at=at,
                    level=line.level, text=text,
                )
            )  # fmt: skip
        if kept:
            tell(self.session, "news")

    def measure(self, job: Job, unit: Unit, metrics: Sequence[Metric], now: float) -> None:
        """Add values to curves: the newest `MAX_METRICS`; a value that is measured again replaces the old one."""
        kept = [m for m in metrics if abs(m.step) <= MAX_STEP][-MAX_METRICS:]
        if dropped := len(metrics) - len(kept):
            text = f"{dropped} metrics left out: a report carries at most {MAX_METRICS}, steps up to 2^53"
            self.log(job, unit, [LogLine(at=now, level="warning", text=text)], now)
        rows = {
            (m.name[:MAX_NAME_CHARS], m.step): {
                "job_id": job.id, "tenant": job.tenant, "stage": unit.stage, "name": m.name[:MAX_NAME_CHARS], "step": m.step,
                "unit": unit.index, "value": m.value if math.isfinite(m.value) else None, "at": now,
            }
            for m in kept
        }  # fmt: skip
        if rows:
            statement = upsert(self.session, MetricRow)
            new = {"value": statement.excluded.value, "at": statement.excluded.at}
            keys = ["job_id", "stage", "name", "step", "unit"]
            self.session.execute(statement.on_conflict_do_update(index_elements=keys, set_=new), list(rows.values()))

    def traceparent(self, job_id: str) -> str | None:
        """The trace of the request that posted the job."""
        first = self.session.get(Event, (job_id, 1))
        return None if first is None else first.data.get("traceparent")

    def events(self, job: Job, after: int, limit: int) -> list[Event]:
        """Up to `limit` events with a number above `after`, in order."""
        query = (
            select(Event)
            .where(Event.tenant == job.tenant, Event.job_id == job.id, Event.seq > after)
            .order_by(Event.seq)
        )
        return list(self.session.scalars(query.limit(limit)))

    def lines(
        self, job: Job, *, stage: str | None, unit: int | None, after: int, tail: int | None, limit: int
    ) -> list[LogRow]:
        """Lines with a number above `after`: the first `limit`, or the last `tail`; in order."""
        query = select(LogRow).where(LogRow.tenant == job.tenant, LogRow.job_id == job.id, LogRow.seq > after)
        if stage is not None:
            query = query.where(LogRow.stage == stage)
        if unit is not None:
            query = query.where(LogRow.unit == unit)
        if tail is not None:
            return list(self.session.scalars(query.order_by(LogRow.seq.desc()).limit(tail)))[::-1]
        return list(self.session.scalars(query.order_by(LogRow.seq).limit(limit)))

    def furthest(self, job: Job) -> dict[str, list[MetricRow]]:
        """The value at the last step of every curve of `job`, by stage; of units at the same step the newest."""
        own = (MetricRow.tenant == job.tenant, MetricRow.job_id == job.id)
        curve = (MetricRow.stage, MetricRow.name)
        last = select(*curve, func.max(MetricRow.step).label("step")).where(*own).group_by(*curve).subquery()
        there = and_(*(getattr(MetricRow, name) == last.c[name] for name in ("stage", "name", "step")))
        query = select(MetricRow).join(last, there).where(*own).order_by(*curve, MetricRow.at, MetricRow.unit)
        newest = {(row.stage, row.name): row for row in self.session.scalars(query)}
        found: dict[str, list[MetricRow]] = {}
        for (stage, _), row in newest.items():
            found.setdefault(stage, []).append(row)
        return found

    def at(self, tenant: str, job_id: str, stage: str, steps: Collection[int]) -> dict[int, dict[str, float | None]]:
        """What the curves of a stage say at some steps: by step, by name."""
        query = select(MetricRow).where(
            MetricRow.tenant == tenant, MetricRow.job_id == job_id, MetricRow.stage == stage
        )
        found: dict[int, dict[str, float | None]] = {}
        for row in self.session.scalars(query.where(MetricRow.step.in_(steps)).order_by(MetricRow.name)):
            found.setdefault(row.step, {})[row.name] = row.value
        return found

    def curve(self, job: Job, names: Iterable[str], stage: str | None, since_step: int, limit: int) -> list[MetricRow]:
        """Values with a step above `since_step`, ordered by stage, name, step."""
        query = select(MetricRow).where(MetricRow.tenant == job.tenant, MetricRow.job_id == job.id)
        query = query.where(MetricRow.step > since_step)
        if names := list(names):
            query = query.where(MetricRow.name.in_(names))
        if stage is not None:
            query = query.where(MetricRow.stage == stage)
        order = (MetricRow.stage, MetricRow.name, MetricRow.step, MetricRow.unit)
        return list(self.session.scalars(query.order_by(*order).limit(limit)))
