"""Metrics on a port of their own, so that what a network lets Prometheus reach is not what it lets people reach.

Off unless a port is named. The page tells names of queues and stages, and how much of what there is, to whoever can reach
it: it listens on the loopback address unless it is told another one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from eagle3_core.errors import AerieError


class MetricsAddress(AerieError):
    """The metrics cannot be served at their address."""

    code, status = "metrics.address", 409


class Scrapable:
    """Serves `registry` until closed."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Raises MetricsAddress."""
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise MetricsAddress(
                f"metrics cannot be served at {host} port {port}: {error.strerror}",
                remedy="choose another port, or off for no metrics",
            ) from None
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def port_of(environment: Mapping[str, str], name: str) -> int | None:
    """The port that variable `name` holds; None (no metrics) where it is not set, or `off`. Raises MetricsAddress.

    A free port (0) is refused: nobody would know which.
    """
    text = environment.get(name) or "off"
    if text == "off":
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 65535):
        raise MetricsAddress(f"{name}={text} is no port", remedy="give a number from 1 to 65535, or off for no metrics")
    return int(text)
