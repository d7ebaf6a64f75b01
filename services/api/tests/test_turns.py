"""Whose turn it is: tenants share the workers, by weight; a tenant orders its own jobs."""

from __future__ import annotations

from typing import Any

import pytest
from people import tenant
from sqlalchemy import text

from aerie_api.house import House
from aerie_api.leases.turns import Turns


def test_one_tenants_many_jobs_do_not_starve_anothers_one(closed, document):
    red, blue = tenant(closed, "red"), tenant(closed, "blue")
    for number in range(10):
        closed.http.post("/jobs", json=document(f"fox{number}"), headers=red)
    closed.worker("w1").take()
    late = closed.http.post("/jobs", json=document("hen"), headers=blue).json()["id"]
    assert closed.worker("w2").take().job_id == late
    assert closed.worker("w3").take().tenant == "red"


def test_a_single_worker_goes_round(closed, document):
    red, blue = tenant(closed, "red"), tenant(closed, "blue")
    for number in range(3):
        closed.http.post("/jobs", json=document(f"fox{number}"), headers=red)
    closed.http.post("/jobs", json=document("hen"), headers=blue)
    worker, served = closed.worker(), []
    for _ in range(6):
        closed.clock.pass_(1)
        served.append((unit := worker.take()).tenant)
        worker.commit(unit)
    assert served in (["red", "blue"] * 3, ["blue", "red"] * 3)


def test_weights_share_the_workers(closed, document):
    red, blue = tenant(closed, "red", weight=3), tenant(closed, "blue")
    for number in range(8):
        for headers in (red, blue):
            closed.http.post("/jobs", json=document(f"fox{number}"), headers=headers)
    held = [closed.worker(f"w{number}").take().tenant for number in range(8)]
    assert (held.count("red"), held.count("blue")) == (6, 2)


def test_priority_moves_a_job_among_those_of_its_tenant_only(closed, document):
    red, blue = tenant(closed, "red"), tenant(closed, "blue")
    low, high = (
        closed.http.post("/jobs", json=document(n, priority=p), headers=red).json()["id"]
        for n, p in (("fox", 0), ("hen", 50))
    )
    other = closed.http.post("/jobs", json=document(priority=-100), headers=blue).json()["id"]
    shown = closed.http.get(f"/jobs/{low}", headers=red).json()
    assert shown["spec"]["priority"] == 0
    taken = [closed.worker(f"w{n}").take().job_id for n in range(3)]
    assert set(taken[:2]) == {high, other}
    assert taken[2] == low


def test_a_priority_is_part_of_no_key(api, document):
    api.post()
    api.worker().run(also=True)
    again = api.post(document("hen", priority=5, training={"epochs": 9}))
    assert api.stage(again["id"], "extract")["reused"]


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_a_turn_among_ten_thousand_units_is_probes_of_indexes(api):
    house: House = api.house
    with house.db.write() as session:
        session.execute(text(_MANY))
        session.execute(text(_MANY_UNITS))
    with house.db.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("ANALYZE"))
    statements: list[Any] = []
    with house.db.read() as session:
        turns = Turns(session)
        plain = session.scalar

        def note(statement: Any, *more: Any, **options: Any) -> Any:
            statements.append(statement.params(*more))
            return plain(statement, *more, **options)

        session.scalar = note  # type: ignore[method-assign]
        assert turns.next_place(["extract", "prep"], 1e9) is not None
        session.scalar = plain  # type: ignore[method-assign]
        plans = [_plan(session, statement) for statement in statements]
    assert any("ix_units_turn" in plan for plan in plans)
    assert not any("Seq Scan on units" in plan for plan in plans), plans
    assert max(_rows_read(plan) for plan in plans) <= 100


_MANY = """
INSERT INTO jobs (id, tenant, name, rank, status, spec, sources, warnings, created_at, version, event_seq, log_seq)
SELECT 'job_' || n, 'default', 'fox' || n, 0, 'queued', '{}', '{}', '[]', n, 1, 0, 0 FROM generate_series(1, 1000) n
"""
_MANY_UNITS = """
INSERT INTO units (id, tenant, job_id, job_number, rank, stage, position, queue, unit_index, unit_start, unit_stop, unit_of,
                   key, state, fence, attempt, failures, losses, preemptions, not_before)
SELECT 'unit_' || j.number || '_' || n, j.tenant, j.id, j.number, 0, 'extract', 3, 'extract', n, 0, 1, 10,
       'k', 'queued', 0, 0, 0, 0, 0, 0 FROM jobs j, generate_series(1, 10) n
"""


def _plan(session: Any, statement: Any) -> str:
    compiled = statement.compile(session.get_bind(), compile_kwargs={"literal_binds": True})
    return "\n".join(
        row[0] for row in session.execute(text(f"EXPLAIN ANALYZE {str(compiled).replace(':', chr(92) + ':')}"))
    )


def _rows_read(plan: str) -> float:
    import re

    return max((float(rows) for rows in re.findall(r"actual time=\S+ rows=([0-9.]+)", plan)), default=0)
