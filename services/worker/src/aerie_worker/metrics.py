"""What Prometheus reads of a worker: what it runs now, how its units ended, whether it reaches the API."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from eagle3_core.jobs.wire import Progress

REGISTRY = CollectorRegistry()
ENDED = Counter("aerie_worker_units", "Units that ended here, by how.", ["stage", "outcome"], registry=REGISTRY)
SECONDS = Histogram(
    "aerie_worker_unit_seconds", "Time that units took here.", ["stage"],
    buckets=(1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600), registry=REGISTRY,
)  # fmt: skip
TOKENS = Gauge("aerie_worker_tokens_per_second", "What the running unit reports.", ["stage"], registry=REGISTRY)
AWAY = Gauge("aerie_worker_api_away", "Whether the API could not be asked for work.", registry=REGISTRY)


def progressed(stage: str, progress: Progress) -> None:
    """The running unit told how far it is."""
    if progress.tokens_per_s is not None:
        TOKENS.labels(stage).set(progress.tokens_per_s)


def unit_ended(stage: str, outcome: str, seconds: float) -> None:
    """A unit ended: `committed`, `lease_lost`, or a cause."""
    TOKENS.labels(stage).set(0)
    ENDED.labels(stage, outcome).inc()
    SECONDS.labels(stage).observe(seconds)
