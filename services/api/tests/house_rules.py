"""What must hold in the database of a house at every moment, whatever was asked of it; and a store that costs no disk."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, invariant
from sqlalchemy import Engine, text

from eagle3_core.objects.protocol import ObjectMissing, Stat

TERMINAL = {"succeeded", "failed", "cancelled"}
ROWS: dict[str, Any] = {}


class MemoryStore:
    """Objects in a dict."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def put_bytes(self, key: str, data: bytes) -> None:
        self.held[key] = data

    def put_file(self, key: str, path: Any) -> None:
        self.held[key] = path.read_bytes()

    def get_bytes(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.stat(key)
        return self.held[key][start : None if length is None else start + length]

    def fetch(self, key: str, folder: Any) -> Any:
        raise NotImplementedError

    def stat(self, key: str) -> Stat:
        if key not in self.held:
            raise ObjectMissing(key)
        return Stat(key, len(self.held[key]), 0.0)

    def list(self, prefix: str) -> Iterator[Stat]:
        return (self.stat(key) for key in sorted(self.held) if key.startswith(prefix))

    def delete(self, key: str) -> None:
        self.held.pop(key, None)

    def free_bytes(self) -> int | None:
        return None


class HouseRules(RuleBasedStateMachine):
    """Reads the database past the code under test after every step, and holds it against the rules."""

    def __init__(self, beside: Engine) -> None:
        super().__init__()
        self.beside = beside.connect()
        self.commits: dict[str, Any] = {}
        self.planned: dict[tuple[str, str], tuple[float, frozenset[str]]] = {}
        self.status: dict[str, str] = {}
        self.retried: set[str] = set()

    def rows(self, table: str) -> list[Any]:
        """All rows of `table`, as they lie there: nothing of the code under test stands between."""
        found = self.beside.execute(text(f"SELECT * FROM {table}"))
        if table not in ROWS:
            ROWS[table] = namedtuple(table, found.keys())
        return [ROWS[table](*values) for values in found]

    @invariant()
    def the_house_is_in_order(self) -> None:
        jobs, units, stages = self.rows("jobs"), self.rows("units"), self.rows("stages")
        self.every_job_is_moved_by_a_unit_or_ended(jobs, units)
        self.terminal_jobs_move_only_when_asked(jobs)
        self.stages_are_planned_once(stages, units)
        self.stages_are_done_in_order(stages)
        self.leases_belong_to_running_units_only(units)
        commits = {row.key: row.manifest for row in self.rows("commits")}
        assert {key: commits.get(key) for key in self.commits} == self.commits, "a result was replaced"
        self.commits = commits

    def every_job_is_moved_by_a_unit_or_ended(self, jobs: list[Any], units: list[Any]) -> None:
        for job in jobs:
            mine = {u.state for u in units if u.job_id == job.id}
            if job.status in ("queued", "running"):
                assert mine & {"queued", "running"}, f"{job.status} job is lost"
            elif job.status == "paused":
                assert "queued" not in mine, "a paused job gives out work"
                assert job.reason is not None
            elif job.status == "cancelling":
                assert "running" in mine
                assert not mine & {"queued", "paused"}
            else:
                assert not mine & {"queued", "paused"}, f"{job.status} job still gives out work"
                assert (job.status == "failed") == (job.reason is not None)
                assert job.finished_at is not None

    def terminal_jobs_move_only_when_asked(self, jobs: list[Any]) -> None:
        for job in jobs:
            old = self.status.get(job.id)
            assert old not in TERMINAL or job.status == old or job.id in self.retried
            self.status[job.id] = job.status
        self.retried.clear()

    def stages_are_planned_once(self, stages: list[Any], units: list[Any]) -> None:
        for stage in stages:
            mine = frozenset(u.id for u in units if (u.job_id, u.stage) == (stage.job_id, stage.name))
            place = (stage.job_id, stage.name)
            assert self.planned.setdefault(place, (stage.planned_at, mine)) == (stage.planned_at, mine)
            if stage.planned_at is None:
                assert not mine
                del self.planned[place]

    def stages_are_done_in_order(self, stages: list[Any]) -> None:
        jobs: dict[str, list[str]] = {}
        for stage in sorted(stages, key=lambda s: s.position):
            jobs.setdefault(stage.job_id, []).append(stage.state)
        for states in jobs.values():
            done = states.count("succeeded")
            assert states[:done] == ["succeeded"] * done
            assert all(s == "pending" for s in states[done + 1 :])

    def leases_belong_to_running_units_only(self, units: list[Any]) -> None:
        for unit in units:
            held = (unit.worker_id is not None, unit.lease_expires_at is not None)
            assert held == ((True, True) if unit.state == "running" else (False, False))
            assert (unit.state == "succeeded") == (unit.manifest is not None)
