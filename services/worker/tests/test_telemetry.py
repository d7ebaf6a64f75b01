"""What a running worker tells: log lines with the unit that they are about, metrics, and spans down to the child."""

import json
import os
import socket
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from worker_stubs import assignment

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP collector on the loopback address."""

    def __init__(self):
        spans = self.spans = SimpleQueue()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    service = next(
                        a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
                    )
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            spans.put((service, span))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def until(self, *services):
        """One span of each of `services`, waiting for them."""
        found = {}
        while not set(services) <= set(found):
            service, span = self.spans.get(timeout=60)
            found[service] = span
        return [found[service] for service in services]

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


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
    api.units.put(assignment("succeed"))
    api.units.put(assignment("succeed"))
    api.next("commit")
    api.next("commit")  # the first has been counted before the second was begun

    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert 'aerie_worker_units_total{outcome="committed",stage="prepare"}' in page
    assert "aerie_worker_api_away 0.0" in page


@pytest.mark.slow
def test_the_trace_of_the_post_goes_on_in_the_worker_and_in_its_child(api, start_worker, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    start_worker()
    unit = assignment("succeed").model_copy(update={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    api.units.put(unit)

    in_worker, in_child = collector.until("aerie-worker", "aerie-child")

    assert in_worker.trace_id.hex() == in_child.trace_id.hex() == TRACE
    assert in_worker.parent_span_id.hex() == PARENT
    assert in_child.parent_span_id == in_worker.span_id
    told = {a.key: a.value for a in in_child.attributes}
    assert told["aerie.job"].string_value == unit.job_id
    assert os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] == collector.url
