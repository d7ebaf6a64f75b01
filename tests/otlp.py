"""An OpenTelemetry collector for tests: takes spans over OTLP/HTTP on the loopback address, as a real one does, and keeps them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Span:
    """A span as it arrived; ids in hexadecimal, `parent` empty where it has none."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    failed: bool
    attributes: dict[str, str | int]


class Collector:
    """Where spans are to be sent, and those that came."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []
        self.came = threading.Condition()

    def take(self, body: bytes) -> None:
        """Keep the spans of one request."""
        request = ExportTraceServiceRequest.FromString(body)
        with self.came:
            for resource in request.resource_spans:
                service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
                self.spans += [
                    Span(
                        service, span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                        span.status.code == 2,
                        {a.key: a.value.string_value or a.value.int_value for a in span.attributes},
                    )
                    for scope in resource.scope_spans for span in scope.spans
                ]  # fmt: skip
            self.came.notify_all()

    def until(self, what: str, wanted: Callable[[Span], bool]) -> Span:
        """The first span that is `wanted`, waiting for it. Raises AssertionError that says `what` never came."""
        with self.came:
            found = self.came.wait_for(lambda: [span for span in self.spans if wanted(span)], PATIENCE_S)
            assert found, f"waited {PATIENCE_S:.0f} s for {what}; came: {self.spans}"
            return found[0]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port, during the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
