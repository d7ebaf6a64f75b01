"""Random workers, deaths, restarts, cancels and retries: whatever the order, the rules of the house hold.

Workers here may say anything at any time with any token they ever held. After every step the database must be in a
state that leads on: no job without a unit that will move it, no terminal job that moved by itself, no stage planned
twice, no result replaced, no fence used twice. At the end honest workers finish what is left, and every job must end.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from house_rules import TERMINAL, HouseRules, MemoryStore
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from sqlalchemy import Engine, create_engine, delete

from aerie_api.auth import local
from aerie_api.house import House, Parts
from aerie_api.jobs.service import NameInUse
from aerie_api.settings import Settings
from aerie_api.tables import Base
from eagle3_core.jobs.graph import Slice, unit_key
from eagle3_core.jobs.refusals import LeaseLost, WorkerSetAside
from eagle3_core.jobs.states import IllegalMove
from eagle3_core.jobs.wire import Assignment, ClaimRequest, Commit, Failure, Heartbeat, Output
from eagle3_core.objects.manifest import UnitWriter

QUEUES = ["prep", "extract", "train", "evaluate"]
LIVING = {"queued", "running", "paused", "cancelling"}
WORKERS = st.sampled_from(["w1", "w2", "w3"])
EXAMPLES = int(os.environ.get("AERIE_TEST_EXAMPLES", "20"))
"""Random histories a run; a night can afford thousands."""
PICK = st.integers(0, 1 << 16)
CAUSES = st.sampled_from(["failed", "worker_lost", "preempted", "cancelled"])


@dataclass
class Tools:
    """What the machine borrows from the fixtures."""

    house: House
    clock: Any
    beside: Engine
    results: dict[str, dict[str, Any]]
    document: Any


class Machine(HouseRules):
    """One API, three workers, a few jobs."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools.beside)
        self.tools = tools
        self.claims, self.jobs = tools.house.claims, tools.house.jobs.of(local())
        self.attempts: list[Assignment] = []
        self.incarnations = {"w1": 1, "w2": 1, "w3": 1}
        self.fences: dict[str, int] = {}

    @initialize()
    def empty(self) -> None:
        with self.tools.house.db.write() as session:
            for table in reversed(Base.metadata.sorted_tables):
                if table.name != "tenants":
                    session.execute(delete(table))
        self.tools.house.store.held.clear()  # type: ignore[attr-defined]
        self.post("fox", 1)

    # -- what people do

    @rule(name=st.sampled_from(["fox", "hen", "owl"]), epochs=st.integers(1, 2))
    def post(self, name: str, epochs: int) -> None:
        document = self.tools.document(name, training={"epochs": epochs})
        taken = any(j.name == name and j.status not in ("failed", "cancelled") for j in self.rows("jobs"))
        try:
            self.jobs.create(document, b"", None)
        except NameInUse:
            assert taken
        else:
            assert not taken

    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        if (job := self.some(pick, LIVING | TERMINAL)) is None:
            return
        if job.status in LIVING:
            self.jobs.cancel(job.id)
        else:
            with pytest.raises(IllegalMove):
                self.jobs.cancel(job.id)

    @rule(pick=PICK)
    def retry(self, pick: int) -> None:
        if (job := self.some(pick, {"failed", "cancelled"})) is not None:
            try:
                self.jobs.retry(job.id)
            except NameInUse:
                return
            self.retried.add(job.id)

    @rule(pick=PICK)
    def pause(self, pick: int) -> None:
        if (job := self.some(pick, {"queued", "running", "paused"})) is not None:
            self.jobs.pause(job.id)

    @rule(pick=PICK)
    def resume(self, pick: int) -> None:
        if (job := self.some(pick, {"paused"})) is not None:
            self.jobs.resume(job.id)

    # -- what workers do

    @rule(worker=WORKERS, queues=st.sets(st.sampled_from(QUEUES), min_size=1))
    def claim(self, worker: str, queues: set[str]) -> None:
        self.take(worker, sorted(queues))

    @rule(worker=WORKERS)
    def claim_anything(self, worker: str) -> None:
        self.take(worker, QUEUES)

    @rule(worker=WORKERS, units=st.integers(1, 12), also=st.booleans())
    def work(self, worker: str, units: int, also: bool) -> None:
        """An honest worker does some units, so that the other rules meet jobs at every stage."""
        while units and (unit := self.take(worker, QUEUES)) is not None:
            self.claims.commit(unit.unit_run_id, unit.token, self.made(unit, also, "a"))
            units -= 1

    @rule(worker=WORKERS)
    def start_worker_again(self, worker: str) -> None:
        self.incarnations[worker] += 1

    @rule(pick=PICK, stale=st.booleans())
    def heartbeat(self, pick: int, stale: bool) -> None:
        self.say(pick, stale, lambda a: self.claims.heartbeat(a.unit_run_id, a.token, Heartbeat()))

    @rule(pick=PICK, stale=st.booleans(), also=st.booleans(), content=st.sampled_from(["a", "b"]))
    def commit(self, pick: int, stale: bool, also: bool, content: str) -> None:
        def commit(a: Assignment) -> None:
            self.claims.commit(a.unit_run_id, a.token, self.made(a, also, content))

        self.say(pick, stale, commit, again=True)

    @rule(pick=PICK, stale=st.booleans(), cause=CAUSES, retryable=st.booleans())
    def fail(self, pick: int, stale: bool, cause: Any, retryable: bool) -> None:
        failure = Failure(cause=cause, problem={"code": "x", "detail": "y"}, retryable=retryable)
        self.say(pick, stale, lambda a: self.claims.fail(a.unit_run_id, a.token, failure))

    # Steps that random picks seldom bring together:

    @rule(pick=PICK, commits=st.booleans(), cause=CAUSES)
    def end_a_unit_of_a_cancelled_job(self, pick: int, commits: bool, cause: Any) -> None:
        if (attempt := self.attempt(pick, False)) is None:
            return
        job = next(j for j in self.rows("jobs") if j.id == attempt.job_id)
        if job.status in LIVING:
            self.jobs.cancel(job.id)
            self.the_house_is_in_order()
        if commits:
            self.claims.commit(attempt.unit_run_id, attempt.token, self.made(attempt, False, "a"))
        else:
            failure = Failure(cause=cause, problem={"code": "x", "detail": "y"}, retryable=True)
            self.claims.fail(attempt.unit_run_id, attempt.token, failure)

    @rule(pick=PICK, worker=WORKERS, commits=st.booleans())
    def speak_after_the_unit_went_to_another(self, pick: int, worker: str, commits: bool) -> None:
        if (old := self.attempt(pick, False)) is None:
            return
        self.tools.clock.pass_(61)
        self.claims.reap()
        self.tools.clock.pass_(61)
        self.take(worker, QUEUES)
        if commits:
            with pytest.raises(LeaseLost):
                self.claims.commit(old.unit_run_id, old.token, self.made(old, False, "b"))
        else:
            with pytest.raises(LeaseLost):
                self.claims.heartbeat(old.unit_run_id, old.token, Heartbeat())

    # -- what happens

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.tools.clock.pass_(seconds)

    @rule()
    def reap(self) -> None:
        self.claims.reap()

    @rule()
    def start_api_again(self) -> None:
        self.claims.extend_all()

    # -- how it is done

    def some(self, pick: int, states: set[str]) -> Any:
        rows = [row for row in self.rows("jobs") if row.status in states]
        return rows[pick % len(rows)] if rows else None

    def take(self, worker: str, queues: list[str]) -> Assignment | None:
        who = ClaimRequest(worker_id=worker, incarnation=str(self.incarnations[worker]), queues=queues)
        try:
            assignment = self.claims.claim(who)
        except WorkerSetAside:
            self.tools.house.workers.readmit(worker)
            return None
        if assignment is not None:
            assert assignment.fence > self.fences.get(assignment.unit_run_id, 0), "a fence was used twice"
            self.fences[assignment.unit_run_id] = assignment.fence
            self.attempts.append(assignment)
        return assignment

    def say(self, pick: int, stale: bool, what: Any, again: bool = False) -> None:
        """Let a worker speak for an attempt; it must count exactly if that attempt holds its unit."""
        attempt = self.attempt(pick, stale)
        if attempt is None:
            return
        before = {u.id: u for u in self.rows("units")}
        unit = before[attempt.unit_run_id]
        holds = unit.state == "running" and unit.fence == attempt.fence
        try:
            what(attempt)
        except LeaseLost:
            assert not holds, "the holder was turned away"
        else:
            assert holds or (again and unit.state == "succeeded" and unit.fence == attempt.fence)
        if not holds:
            assert {u.id: u for u in self.rows("units")} == before, "one who holds nothing changed something"

    def attempt(self, pick: int, stale: bool) -> Assignment | None:
        """Any attempt that ever was, or one that holds a unit now (taken if there is none)."""
        running = {(u.id, u.fence) for u in self.rows("units") if u.state == "running"}
        held = [a for a in self.attempts if (a.unit_run_id, a.fence) in running]
        among = self.attempts if stale else held
        return among[pick % len(among)] if among else self.take("w1", QUEUES)

    def made(self, unit: Assignment, also: bool, content: str) -> Commit:
        def output(stage: Any, key: str) -> Output:
            place = (unit.unit.index, unit.unit.start, unit.unit.stop)
            writer = UnitWriter(
                self.tools.house.store, tenant=unit.tenant, job_id=unit.job_id, stage=stage, unit=place, unit_key=key,
                fence=unit.fence,
            )  # fmt: skip
            writer.add_bytes("out.bin", f"{stage} {place} {unit.spec.training.epochs} {content}".encode())
            result = self.tools.results.get(stage, {"value": 1})
            return Output(stage=stage, key=key, manifest=writer.commit(result), result=result)

        commit = Commit(output=output(unit.stage, unit.key), seconds=1.0)
        if also and unit.stage == "generate":
            piece = Slice(unit.unit.index, unit.unit.start, unit.unit.stop)
            inputs = {"generate": [commit.output.manifest.content]}
            commit.also.append(
                output("extract", unit_key("extract", unit.spec, piece, inputs, unit.sources, unit.tenant))
            )
        return commit

    def teardown(self) -> None:
        """Honest workers finish what is left, and every job ends."""
        rounds = 20
        try:
            for job in self.rows("jobs"):
                if job.status == "paused":
                    self.jobs.resume(job.id)
            while any(j.status not in TERMINAL for j in self.rows("jobs")) and (rounds := rounds - 1):
                self.tools.clock.pass_(61)
                self.claims.reap()
                self.work("w1", 1000, False)
            jobs = self.rows("jobs")
            assert {j.status for j in jobs} <= TERMINAL
            assert {d.job_id for d in self.rows("drafters")} == {j.id for j in jobs if j.status == "succeeded"}
        finally:
            self.beside.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_order_of_events_loses_a_job_or_lets_a_stale_worker_write(make_api, document, database, tmp_path):
    from_fixture = make_api("fixture")
    clock, parts = from_fixture.clock, from_fixture.parts
    given = Settings(
        run_dir=tmp_path / "run", data_dir=tmp_path / "data", max_losses=3, database_url=database("machine")
    )
    house = House(
        given,
        Parts(preflight=parts.preflight, reduce=parts.reduce, clock=clock, store=MemoryStore(), reaper=False),
    )
    results = {"prepare": {"samples": 4, "eval_prompts": 4}, "package": from_fixture.results["package"]}
    place = given.database
    beside = create_engine(f"sqlite:///{place}" if isinstance(place, Path) else place, isolation_level="AUTOCOMMIT")
    tools = Tools(house, clock, beside, results, document)
    try:
        run_state_machine_as_test(
            lambda: Machine(tools),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=30,
                deadline=None,
                print_blob=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        beside.dispose()
        house.close()
