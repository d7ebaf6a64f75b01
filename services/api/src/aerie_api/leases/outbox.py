"""Rings the doorbell for units that may be claimed: after the commit that made them so, and again if nobody came.

The outbox is the unit's own row: `rung_at` is null from the moment a unit becomes claimable (whoever makes it so writes
state and null in one transaction) until a ring for it goes out. So there is nothing to keep in step, delays
(`not_before`) are honoured by the same query that the claim uses, and a unit that was claimed meanwhile is not rung.

    take    mark what is due as rung, in a transaction of its own; of two API processes each gets other rows
    send    to the broker, outside any transaction; if it is away, what was marked is unmarked
    top up  a queue of the broker that is shorter than its units have waited has lost rings (a flush, a killed worker):
            the difference is rung again. Counting keeps a busy fleet's queue from growing with every pass.

Nobody waits for any of it: a broker that is away costs latency, since workers also ask by themselves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from aerie_api.broker import Broker, BrokerAway, Ring
from aerie_api.db import Database
from aerie_api.leases.rings import RingRepository

BATCH = 100
LONGEST_PAUSE_S = 10.0
logger = logging.getLogger(__name__)


class Outbox:
    """Sends what is due. `again_s`: a unit that nobody claimed for so long after its ring may be rung again."""

    def __init__(self, db: Database, broker: Broker, again_s: float, clock: Callable[[], float]) -> None:
        self._db = db
        self._broker = broker
        self._again_s = again_s
        self._clock = clock

    def publish(self) -> float | None:
        """Ring for every unit that is due; seconds until the next one will be. Raises BrokerAway."""
        while rings := self._take():
            try:
                self._broker.send(rings)
            except BrokerAway:
                with self._db.write() as session:
                    RingRepository(session).unmark([ring.unit_id for ring in rings])
                raise
        now = self._clock()
        with self._db.read() as session:
            due = RingRepository(session).next_due(now)
        return None if due is None else due - now

    def _take(self) -> list[Ring]:
        now = self._clock()
        with self._db.read() as session:
            if not RingRepository(session).any_due(now):
                return []
        with self._db.write() as session:
            return [Ring(unit, queue) for unit, queue in RingRepository(session).mark_due(now, BATCH)]

    def top_up(self) -> int:
        """Let units be rung again whose rings seem lost; how many. Raises BrokerAway."""
        before = self._clock() - self._again_s
        with self._db.read() as session:
            unheard = RingRepository(session).unheard(before)
        lost = {queue: count - self._broker.waiting(queue) for queue, count in unheard.items()}
        short = {queue: count for queue, count in lost.items() if count > 0}
        if short:
            with self._db.write() as session:
                for queue, count in short.items():
                    RingRepository(session).unmark_oldest(queue, before, count)
        return sum(short.values())


class Ringer:
    """Runs an outbox on a thread of the API process: at every hint of work, and every `again_s` seconds."""

    def __init__(self, outbox: Outbox, again_s: float) -> None:
        self._outbox = outbox
        self._again_s = again_s
        self._hint = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringer", daemon=True)
        self.failing: str | None = None
        """What the last pass failed with; null when it went well."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def hint(self) -> None:
        """Some unit may be claimable now."""
        self._hint.set()

    def stop(self) -> None:
        """End; a ring that is under way to a broker that hangs is not waited for."""
        self._stop.set()
        self._hint.set()
        if self._thread.is_alive():
            self._thread.join(2)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        bad, wait_s, topped_up = 0, 0.0, time.monotonic()
        while not self._stop.is_set():
            self._hint.wait(wait_s)
            self._hint.clear()
            try:
                if time.monotonic() - topped_up >= self._again_s:
                    self._outbox.top_up()
                    topped_up = time.monotonic()
                due = self._outbox.publish()
            except (BrokerAway, SQLAlchemyError, OSError) as error:
                bad += 1
                wait_s = min(0.25 * 2 ** min(bad, 10), LONGEST_PAUSE_S)
                if self.failing is None:
                    logger.warning("rings cannot be sent, trying again until they can: %s", error)
                self.failing = str(error)
                self._stop.wait(wait_s)
            else:
                if self.failing is not None:
                    logger.warning("rings are sent again")
                bad, self.failing = 0, None
                wait_s = self._again_s if due is None else min(self._again_s, max(due, 0.01))
