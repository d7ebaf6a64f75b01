"""The API's end of the broker: rings go out, and the length of a queue can be asked. Nothing is ever read from it.

One connection is kept, by the one thread that rings; after any error the next call begins with a new one. Celery is
imported when a broker is configured and not before: an embedded house has none and starts 1 s earlier.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from eagle3_core.errors import AerieError
from eagle3_core.jobs import rings


class BrokerAway(AerieError):
    """The broker does not answer."""

    code, status, retryable = "broker.away", 503, True


@dataclass(frozen=True)
class Ring:
    """Word that `queue` has work; `unit_id` is the unit that made it so."""

    unit_id: str
    queue: str


class Broker(Protocol):
    """Where rings go."""

    def send(self, given: Sequence[Ring]) -> None:
        """Put rings into their queues. Raises BrokerAway; then any part of them may have been sent."""
        ...

    def waiting(self, queue: str) -> int:
        """How many rings nobody has heard yet. Raises BrokerAway."""
        ...

    def close(self) -> None:
        """Let the connection go."""
        ...


class CeleryBroker:
    """Rings as Celery tasks."""

    def __init__(self, url: str, prefix: str = rings.PREFIX) -> None:
        from celery import Celery

        self._app: Any = Celery("aerie", broker=url, set_as_current=False)
        self._app.conf.update(rings.celery_settings(prefix))
        self._connection: Any = None
        self._channel: Any = None

    def send(self, given: Sequence[Ring]) -> None:
        """Put rings into their queues. Raises BrokerAway; then any part of them may have been sent."""
        with self._talk() as channel:
            producer = self._app.amqp.Producer(channel, auto_declare=False)
            for ring in given:
                self._app.send_task(
                    rings.TASK, kwargs={"stage_run_id": ring.unit_id}, queue=ring.queue, producer=producer,
                    ignore_result=True, retry=False,
                )  # fmt: skip

    def waiting(self, queue: str) -> int:
        """How many rings nobody has heard yet. Raises BrokerAway."""
        with self._talk() as channel:
            return int(channel.queue_declare(queue).message_count)

    def close(self) -> None:
        """Let the connection go."""
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            connection.collect(socket_timeout=rings.CONNECT_TIMEOUT_S)

    @contextmanager
    def _talk(self) -> Generator[Any]:
        """The channel of a living connection; whatever goes wrong closes it and becomes BrokerAway."""
        try:
            if self._connection is None:
                self._connection = self._app.connection_for_write()
                self._channel = self._connection.channel()
            yield self._channel
        except _errors() as error:
            self.close()
            raise BrokerAway(
                f"the broker does not answer: {error}",
                remedy="start it again; no job is lost, and until then workers find work by asking the API",
            ) from error


def _errors() -> tuple[type[Exception], ...]:
    from kombu.exceptions import KombuError
    from redis.exceptions import RedisError

    return (KombuError, RedisError, OSError)
