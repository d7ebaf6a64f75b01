"""Traces: from the request that posted a job to the process that ran each of its units.

OpenTelemetry is loaded only where OTEL_EXPORTER_OTLP_ENDPOINT (or its form for traces) says where spans go; elsewhere
everything here does nothing and costs nothing. What joins processes is one line of text, the W3C `traceparent`: the API
keeps it with the job, an assignment carries it to the worker and on to the child. A child lives longer than a unit, so
its environment names the collector, and each unit brings its own parent.

A collector that is away costs spans, never work: they wait in a bounded queue and are dropped when it is full.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Kind = Literal["internal", "server", "client", "consumer"]
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EVERY_MS, LAST_MS = 1000, 3000
_provider: TracerProvider | None = None


def configure(service: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Send this process's spans, as those of `service`, to where `environment` says; whether it does."""
    global _provider
    if _provider is not None or not any(environment.get(name) for name in ENDPOINTS):
        return _provider is not None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    _provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=3), schedule_delay_millis=EVERY_MS))
    return True


def close() -> None:
    """Send what is left, for at most three seconds, and send nothing more."""
    global _provider
    if _provider is not None:
        _provider.force_flush(LAST_MS)
        _provider.shutdown()
        _provider = None


@contextmanager
def span(name: str, parent: str | None = None, kind: Kind = "internal", **attributes: Any) -> Generator[Span]:
    """A span around the block, under `parent` (a traceparent) or under the span that the block runs in.

    An error that leaves the block is noted in the span. Attributes that are None are left out.
    """
    if _provider is None:
        yield Span(None)
        return
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": parent}) if parent else None
    tracer = _provider.get_tracer("aerie")
    given = {f"aerie.{key}": value for key, value in attributes.items() if value is not None}
    with tracer.start_as_current_span(name, context, SpanKind[kind.upper()], given) as real:
        yield Span(real)


class Span:
    """The span of a block; of none where nothing is traced."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def rename(self, name: str) -> None:
        """Call it `name`."""
        if self._real is not None:
            self._real.update_name(name)

    def set(self, **attributes: Any) -> None:
        """Add attributes."""
        if self._real is not None:
            for key, value in attributes.items():
                self._real.set_attribute(f"aerie.{key}", value)

    def fail(self, why: str) -> None:
        """What the block did went wrong."""
        if self._real is not None:
            from opentelemetry.trace import Status, StatusCode

            self._real.set_status(Status(StatusCode.ERROR, why))


def current() -> str | None:
    """The traceparent of the span that this code runs in; None where nothing is traced."""
    if _provider is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent")
