"""What a running worker tells: log lines with the unit that they are about, metrics, and spans down to the child."""

import json
import socket
import urllib.request

import pytest
from otlp import collecting
from prometheus_client import generate_latest
from worker_stubs import assignment

from aerie_worker.metrics import REGISTRY, progressed, unit_ended
from eagle3_core.jobs.wire import Progress

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector():
    with collecting() as collector:
        yield collector


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.slow
def test_a_worker_says_of_every_line_which_unit_it_is_about(api, start_worker):
    worker = start_worker()
    api.units.put(assignment("print"))
    api.next("commit")

    for text in worker.stderr:
        line = json.loads(text)
        if line["logger"] == "aerie.child" or "committed" in line["event"]:
            unit = assignment("print")
            assert (line["job"], line["stage"], line["unit"], line["attempt"]) == (
                unit.job_id, unit.stage, unit.unit.index, unit.attempt,
            )  # fmt: skip
            assert line["tenant"] == unit.tenant
            assert unit.token not in text
        if "committed" in line["event"]:
            break
    else:
        pytest.fail("no line tells of the commit")


@pytest.mark.slow
def test_a_worker_counts_its_units_on_a_port_of_its_own(api, start_worker, monkeypatch):
    port = free_port()
    monkeypatch.setenv("AERIE_WORKER_METRICS_PORT", str(port))
    start_worker()
    api.units.put(assignment("count"))
    api.units.put(assignment("count"))
    api.next("commit")
    api.next("commit")  # the first has been counted before the second was begun

    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert 'aerie_worker_units_total{outcome="committed",stage="prepare"}' in page
    assert "aerie_worker_api_away 0.0" in page


def test_a_worker_tells_the_pace_of_its_unit_in_tokens_until_that_ends():
    def told() -> str:
        return generate_latest(REGISTRY).decode()

    progressed("train", Progress(done=1, total=9, tokens_per_s=1200, note="said in any words"))
    assert 'aerie_worker_tokens_per_second{stage="train"} 1200.0' in told()
    progressed("train", Progress(done=2, total=9, note="saving"))
    unit_ended("train", "committed", 3.0)
    assert 'aerie_worker_tokens_per_second{stage="train"} 0.0' in told()


@pytest.mark.slow
def test_the_trace_of_the_post_goes_on_in_the_worker_and_in_its_child(api, start_worker, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    start_worker()
    unit = assignment("count").model_copy(update={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    api.units.put(unit)

    in_worker = collector.until("the worker's span", lambda span: span.service == "aerie-worker")
    in_child = collector.until("the child's span", lambda span: span.service == "aerie-child")

    assert in_worker.trace == in_child.trace == TRACE
    assert in_worker.parent == PARENT
    assert in_child.parent == in_worker.id
    assert in_child.attributes["aerie.job"] == unit.job_id
    assert not in_child.failed


@pytest.mark.slow
def test_the_spans_of_a_unit_that_fails_say_so_in_worker_and_child(api, start_worker, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    start_worker()
    api.units.put(assignment("crash").model_copy(update={"traceparent": f"00-{TRACE}-{PARENT}-01"}))

    assert collector.until("the worker's span", lambda span: span.service == "aerie-worker").failed
    assert collector.until("the child's span", lambda span: span.service == "aerie-child").failed
