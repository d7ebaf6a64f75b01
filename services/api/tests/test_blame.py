"""Which failures say something about the worker that met them: every code after which a unit is tried again has its answer here."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from aerie_api.leases.worker_health import blames
from eagle3_core.jobs.states import Cause
from eagle3_core.jobs.wire import Failure

ERRORS = (Path(__file__).parents[3] / "docs/errors.md").read_text()
CODES = {code: again == "yes" for code, again in re.findall(r"^\| `([^`]+)` \| \d+ \| (yes|no) \|", ERRORS, re.M)}
WORKER = {
    "device.no_gpu", "store.refused", "training.rank_lost", "unit.child_died", "unit.crashed", "unit.disk_full",
    "unit.out_of_memory", "unit.preempted", "unit.stuck", "unit.worker_lost", "worker.doorbell",
}  # fmt: skip
"""The machine, or what runs on it."""
ENGINE = {
    "capture.incomplete",
    "capture.missing",
    "capture.receipt",
    "capture.sink",
    "capture.stalled",
    "verifier.server",
}
"""The worker's own engine, or a server that the job names."""
ELSEWHERE = {
    "api.not_ready", "api.unreachable", "broker.away", "database.away", "database.busy", "database.storage", "endpoint.down",
    "idempotency.in_flight", "object.missing", "preflight.busy", "rate.limited", "store.full", "store.unavailable",
    "verifier.busy",
}  # fmt: skip
"""What every worker would have met."""
OWN = SimpleNamespace(spec={"verifier": {"model": "m", "endpoint": None}})
NAMED = SimpleNamespace(spec={"verifier": {"model": "m", "endpoint": {"url": "http://10.0.0.9:30000"}}})


def blamed(code: str, job=OWN, cause: Cause = Cause.FAILED, retryable: bool = True) -> bool:
    return blames(job, Failure(cause=cause, problem={"code": code}, retryable=retryable))


def test_every_code_after_which_a_unit_is_tried_again_has_its_answer_here():
    assert {code for code, again in CODES.items() if again} == WORKER | ENGINE | ELSEWHERE


@pytest.mark.parametrize("code", sorted(CODES))
def test_a_worker_is_blamed_for_its_own_machine_and_for_nothing_else(code: str):
    again = CODES[code]

    assert blamed(code, retryable=again) is (code in WORKER | ENGINE)
    assert blamed(code, NAMED, retryable=again) is (code in WORKER)
    assert not any(blamed(code, cause=cause) for cause in Cause if cause != Cause.FAILED)


@pytest.mark.parametrize("code", ["endpoint.down", "verifier.busy", "verifier.server"])
def test_a_dead_server_that_jobs_name_sets_no_healthy_worker_aside(make_api, document, code: str):
    api = make_api(max_attempts=50)
    for name in ("fox", "hen", "owl"):
        api.post(document(name, verifier={"endpoint": {"url": "http://127.0.0.1:9"}}))
    worker = api.worker()

    for unit in [worker.take(), worker.take(), worker.take()]:
        assert worker.fail(unit, code=code).status_code == 200

    api.clock.pass_(100)
    assert worker.claim() is not None
