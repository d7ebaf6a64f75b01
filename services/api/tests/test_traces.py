"""A posted job carries its trace to whoever runs its units."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue

import pytest
from conftest import job_document

from eagle3_core.telemetry import traces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collected():
    """Bodies that arrive at a collector to which this process's spans go."""
    bodies: SimpleQueue[bytes] = SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert traces.configure("aerie-api")
        yield bodies
        traces.close()
    server.shutdown()
    server.server_close()


def test_a_unit_of_a_posted_job_belongs_to_the_trace_of_the_post(api, collected):
    post = api.http.post("/jobs", json=job_document(), headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert post.status_code == 202
    worker = api.worker()
    first = worker.take()
    worker.commit(first)
    second = worker.take()

    version, trace, span, _ = first.traceparent.split("-")
    assert (version, trace) == ("00", TRACE)
    assert span != PARENT
    assert second.traceparent == first.traceparent
    traces.close()
    sent = b""
    while not collected.empty():
        sent += collected.get()
    assert bytes.fromhex(span) in sent
    assert b"POST /jobs" in sent
    assert b"aerie-api" in sent


def test_without_a_collector_a_unit_carries_no_trace(api):
    api.post()
    assert api.worker().take().traceparent is None
