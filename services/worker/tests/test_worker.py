"""The worker as a process: signals, exit codes, an API that comes and goes, and no orphan at the end."""

import contextlib
import signal

import pytest
from worker_stubs import TOKEN, assignment, gone

from aerie_worker import __main__ as entry
from aerie_worker.claim import Control
from aerie_worker.executors.local import fits, for_children, machine_gpus
from aerie_worker.patience import pauses
from eagle3_core.jobs.wire import Assignment


def other_verifier(unit: Assignment) -> Assignment:
    return unit.model_copy(update={"sources": {"verifier": "v2"}})


@pytest.mark.slow
def test_a_worker_claims_runs_and_commits_unit_after_unit(api, start_worker):
    start_worker()
    api.units.put(assignment("count"))
    api.units.put(assignment("count"))

    results = [api.next("commit")[0]["output"]["result"] for _ in range(2)]

    assert results == [{"unit": 1, "loads": 1}, {"unit": 2, "loads": 1}]


@pytest.mark.slow
def test_sigterm_preempts_the_unit_and_ends_with_75(api, start_worker, tmp_path):
    worker = start_worker()
    api.units.put(assignment("wait"))
    api.heartbeat_with_note("waiting")

    worker.send_signal(signal.SIGTERM)

    assert api.next("fail")[0]["cause"] == "preempted"
    assert worker.wait(30) == 75
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
def test_sigterm_ends_a_waiting_worker_at_once(api, start_worker):
    worker = start_worker()
    api.next("claim")

    worker.send_signal(signal.SIGTERM)

    assert worker.wait(30) == 75


@pytest.mark.slow
def test_a_second_sigterm_kills_the_unit_with_all_its_processes(api, start_worker):
    worker = start_worker()
    api.units.put(assignment("stubborn"))
    pids = list(map(int, api.heartbeat_with_note("stubborn")["note"].split()[1:]))

    worker.send_signal(signal.SIGTERM)
    read_until(worker, "asking it to save and stop")
    worker.send_signal(signal.SIGTERM)

    assert worker.wait(30) == 75
    assert all(gone(pid) for pid in pids)
    assert api.next("fail")[0]["cause"] == "preempted"


@pytest.mark.slow
def test_a_worker_that_is_killed_takes_its_child_along(api, start_worker):
    worker = start_worker()
    api.units.put(assignment("stubborn"))
    child, _ = map(int, api.heartbeat_with_note("stubborn")["note"].split()[1:])

    worker.kill()

    assert gone(child)


@pytest.mark.slow
def test_a_child_that_dies_is_replaced_for_the_next_unit(api, start_worker):
    start_worker()
    api.units.put(assignment("abort"))
    api.units.put(assignment("count"))

    failure, commit = api.next("fail")[0], api.next("commit")[0]

    assert failure["problem"]["code"] == "unit.child_died"
    assert commit["output"]["result"] == {"unit": 1, "loads": 1}


@pytest.mark.slow
def test_a_worker_outlives_an_api_that_is_away(api, start_worker):
    worker = start_worker()
    api.next("claim")
    api.stop()
    read_until(worker, "the API is away")

    api.start()
    api.units.put(assignment("count"))

    assert api.next("commit")[0]["output"]["result"]["unit"] == 1


@pytest.mark.slow
def test_a_worker_that_the_api_does_not_know_says_so_and_ends(api, start_worker):
    worker = start_worker(token="stale")

    read_until(worker, "answers 401: not a worker")
    assert worker.wait(30) == 1


def read_until(worker, words: str) -> None:
    """Read the worker's log until a line holds `words`."""
    for line in worker.stderr:
        if words in line:
            return
    raise AssertionError(f"the worker ended without saying {words!r}")


@pytest.mark.parametrize(
    ("last", "following", "has_gpu", "expected"),
    [
        (None, assignment("x", "train"), True, True),
        (assignment("x", "train"), assignment("x", "evaluate"), False, True),
        (assignment("x", "generate"), assignment("x", "evaluate"), True, True),
        (assignment("x", "train"), assignment("x", "evaluate"), True, False),
        (assignment("x", "generate"), other_verifier(assignment("x", "generate")), True, False),
    ],
)
def test_a_child_is_used_again_where_memory_allows_it(last, following, has_gpu, expected):
    assert fits(last, following, has_gpu) is expected


def test_pauses_grow_to_ten_seconds_and_are_spread():
    waits = pauses(spread=lambda: 0.5)

    assert [next(waits) for _ in range(8)] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "worker.token"),
        ({"AERIE_STORE": "file:///s"}, "worker.token"),
        ({"AERIE_STORE": "file:///s", "AERIE_WORKER_TOKEN_FILE": "/nowhere/token"}, "/nowhere/token cannot be read"),
    ],
)
def test_a_worker_that_was_not_told_enough_says_what_is_missing(environment, says, caplog):
    assert entry.main(["--url", "http://127.0.0.1:1"], environment) == 1

    assert says in caplog.text


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, 2), ("0,1,2,3", 2), ("1", 1), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-8c2, GPU-1f0", 2)],
)
def test_a_worker_counts_the_gpus_that_its_units_may_use(tmp_path, visible, gpus):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert machine_gpus(environment, tmp_path) == gpus


def test_a_worker_says_with_every_claim_how_many_gpus_it_has(api):
    with contextlib.closing(Control(api.url, TOKEN, "w1", "i1", ["prep"], gpus=4)) as control:
        control.claim(0)
    assert api.next("claim")[0]["gpus"] == 4


def test_a_child_is_told_nothing_that_opens_the_api_the_queue_or_the_database():
    opening = ("API_KEY", "API_KEY_FILE", "WORKER_TOKEN_FILE", "BROKER_URL", "DATABASE_URL", "DATABASE_PASSWORD_FILE")
    told = for_children({"AERIE_STORE": "file:///s", **{f"AERIE_{name}": "secret" for name in opening}})
    assert "secret" not in told.values()
    assert told["AERIE_STORE"] == "file:///s"


@pytest.mark.parametrize(
    ("store", "sinks", "holds"),
    [(None, None, False), (None, "file:///states", False), ("s3://b", None, True), (None, "s3://states", True)],
)
def test_a_child_has_a_key_to_the_store_only_where_nothing_is_lent_to_it(store, sinks, holds):
    keys = ("AERIE_S3_SECRET_KEY", "AERIE_S3_SECRET_KEY_FILE", "AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE")
    said = {"AERIE_STORE": store, "AERIE_CAPTURE_SINKS": sinks, **dict.fromkeys(keys, "secret")}

    told = for_children({name: value for name, value in said.items() if value is not None})

    assert ("secret" in told.values()) is holds


def test_a_worker_without_a_store_says_so_with_every_claim(api):
    with contextlib.closing(Control(api.url, TOKEN, "w1", "i1", ["prep"], lent=True)) as control:
        control.claim(0)
    assert api.next("claim")[0]["lent"] is True
