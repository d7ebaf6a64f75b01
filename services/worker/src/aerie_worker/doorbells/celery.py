"""The cluster's doorbell: a Celery worker that hears when a queue has work. It never carries the work itself.

Celery runs as it would from its own command line (threads pool, one thread, no acknowledgement, no prefetch), in a
thread of this process, while the main thread claims and supervises as with every other doorbell. The body of the one
task wakes the main thread and ends when that has nothing left to do: Celery counts the worker as busy for just as long
and leaves further rings to those that are free.

Which unit a ring names does not matter: the API hands out the most urgent one of the ring's queue. There is one ring for
every unit, so every unit is claimed, and the order between tenants and jobs is the database's, not the broker's.
A ring for what is done already finds nothing and is dropped.

Rings may be lost with the broker, and Celery has stopped listening after a reconnection before (celery#8030, #8990). So
after every unit, and every half minute, the worker asks by itself: a doorbell that is dead costs seconds, never a job.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from aerie_worker.claim import Control
from eagle3_core.errors import AerieError
from eagle3_core.jobs import rings
from eagle3_core.jobs.wire import Assignment

ASK_EVERY_S = 30.0
STOP_S = 5.0
"""How long a Celery that is asked to stop is waited for."""
log = logging.getLogger("aerie.worker")


class DoorbellBroken(AerieError):
    """The thread that listens to the broker has ended."""

    code, status, retryable = "worker.doorbell", 500, True


@dataclass(frozen=True)
class Heard:
    """A ring; `answered` lets its task end."""

    queue: str
    unit_id: str
    answered: threading.Event = field(default_factory=threading.Event)


class Rung:
    """Claims when a ring or the passing of time says so."""

    def __init__(
        self, control: Control, url: str, queues: list[str], name: str, prefix: str = rings.PREFIX,
        ask_every_s: float = ASK_EVERY_S, listen: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """`name` is the worker's; `listen` is what runs in the thread: default Celery, for as long as it listens."""
        self._control = control
        self._queues = queues
        self._ask_every_s = ask_every_s
        self._rings: SimpleQueue[Heard | None] = SimpleQueue()
        self._ask: list[str] | None = queues
        """Queues to ask for before listening again; what is there already comes first."""
        self._current: Heard | None = None
        self._closed = False
        self._celery = None if listen else _celery(url, prefix, queues, self._on_ring)
        self._listen = listen or (lambda: _run(self._celery, queues, name))
        self._thread = threading.Thread(target=self._until_it_ends, name="doorbell", daemon=True)
        self._thread.start()

    def wait(self) -> Assignment | None:
        """A claimed unit, or None when there was nothing behind the door. Raises Unreachable, Refused, DoorbellBroken.

        While the API cannot be asked, the ring that was heard stays unanswered and no other is taken.
        """
        if self._ask is None:
            self._ask = self._hear()
        unit = self._control.claim(0.0, self._ask)
        if unit is None:
            self._ask = None
            self._answer()
        else:
            self._ask = self._queues
        return unit

    def close(self) -> None:
        """Stop listening. A ring that was heard and not followed is rung again by the API."""
        self._closed = True
        if self._celery is not None:
            from celery.worker import state

            state.should_stop = 0  # Celery's own way to be stopped from another thread
        self._answer()
        while not self._rings.empty():
            if (ring := self._rings.get()) is not None:
                ring.answered.set()
        self._thread.join(STOP_S)

    def _hear(self) -> list[str]:
        """Wait for a ring, or for the time to ask anyway; the queues to ask for."""
        try:
            ring = self._rings.get(timeout=self._ask_every_s * (0.5 + random.random()))  # noqa: S311 - to spread a fleet
        except Empty:
            return self._queues
        if ring is None:
            raise DoorbellBroken(
                "the thread that listens to the broker has ended",
                remedy="start the worker again; its log says why the thread ended",
            )
        self._current = ring
        return [ring.queue]

    def _answer(self) -> None:
        if self._current is not None:
            self._current.answered.set()
            self._current = None

    def _on_ring(self, queue: str, unit_id: str) -> None:
        """The task's body, on Celery's thread."""
        ring = Heard(queue, unit_id)
        self._rings.put(ring)
        if not self._closed:  # set before what waits is drained: one of the two lets this thread go
            ring.answered.wait()

    def _until_it_ends(self) -> None:
        try:
            self._listen()
        finally:
            self._rings.put(None)


def _celery(url: str, prefix: str, queues: list[str], on_ring: Callable[[str, str], None]) -> Any:
    """The Celery application with its one task.

    Rings are taken without acknowledgement. An acknowledgement that meets a broker that just went away is not repeated, the
    message counts as held for ever, and a worker that may hold one message would hear nothing any more. (Celery still
    acknowledges what was never held; where that fails it logs an error that means nothing.)
    """
    from celery import Celery
    from kombu.entity import Exchange, Queue

    app: Any = Celery("aerie", broker=url, set_as_current=False)
    app.conf.update(rings.celery_settings(prefix))
    app.conf.task_queues = [Queue(name, Exchange(name), routing_key=name, no_ack=True) for name in queues]
    for name in ("celery", "kombu"):
        logging.getLogger(name).setLevel(logging.WARNING)  # two lines for every ring otherwise

    @app.task(name=rings.TASK, bind=True, shared=False)
    def ring(task: Any, stage_run_id: str) -> None:
        on_ring(str(task.request.delivery_info["routing_key"]), stage_run_id)

    app.finalize()
    return app


def _run(app: Any, queues: list[str], name: str) -> None:
    """Listen until `close`. No gossip between workers: a fleet of thousands would drown in it."""
    from celery.worker import WorkController, state

    app.set_default()  # the pool's threads look tasks up in the process's default application
    state.should_stop = None
    controller = WorkController(
        app=app, hostname=f"{name}@aerie", queues=queues, pool_cls="threads", concurrency=1,
        without_gossip=True, without_mingle=True, without_heartbeat=True, task_events=False,
    )  # fmt: skip
    controller.start()
