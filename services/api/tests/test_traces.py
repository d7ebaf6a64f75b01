"""A posted job carries its trace to whoever runs its units."""

from __future__ import annotations

import pytest
from otlp import collecting

from eagle3_core.telemetry import traces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector():
    """A collector to which this process's spans go."""
    with collecting() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        assert traces.configure("aerie-api")
        yield collector
        traces.close()


def test_a_unit_of_a_posted_job_belongs_to_the_trace_of_the_post(api, document, collector):
    post = api.http.post("/jobs", json=document(), headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert post.status_code == 202
    worker = api.worker()
    first = worker.take()
    worker.commit(first)
    second = worker.take()

    version, trace, span, _ = first.traceparent.split("-")
    assert (version, trace) == ("00", TRACE)
    assert span != PARENT
    assert second.traceparent == first.traceparent
    posted = collector.until("the span of the post", lambda s: s.name == "POST /jobs")
    assert (posted.service, posted.trace, posted.id, posted.parent) == ("aerie-api", TRACE, span, PARENT)
    assert posted.attributes["aerie.request_id"] == post.headers["x-request-id"]


def test_a_traceparent_that_is_none_begins_a_trace_of_its_own(api, document, collector):
    post = api.http.post("/jobs", json=document(), headers={"traceparent": '00-nonsense" OR 1=1'})
    assert post.status_code == 202
    posted = collector.until("the span of the post", lambda s: s.name == "POST /jobs")
    assert posted.parent == ""
    assert api.worker().take().traceparent.split("-")[1] == posted.trace


def test_without_a_collector_a_unit_carries_no_trace(api):
    api.post()
    assert api.worker().take().traceparent is None
