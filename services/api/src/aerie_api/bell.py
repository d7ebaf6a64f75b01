"""How a thread that changed the database wakes those who wait for a change.

Waiters live on the event loop and hold no thread: a hundred workers in a long poll cost a hundred futures. Whoever
waits registers first, looks second and sleeps third, so a change between looking and sleeping is not missed. A bell
is a hint, never the truth: every waiter looks again after its time-out.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Generator, Hashable
from contextlib import contextmanager


class Bell:
    """Rung from any thread, heard on any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: set[Waiter] = set()
        self.closed = False

    def ring(self) -> None:
        """Wake everyone who waits."""
        with self._lock:
            waiters = list(self._waiters)
        for waiter in waiters:
            waiter.wake()

    def close(self) -> None:
        """Wake everyone for good: the process is about to stop."""
        self.closed = True
        self.ring()

    @contextmanager
    def listen(self) -> Generator[Waiter]:
        """A waiter that hears every ring from now to the end of the block. Call it on the event loop."""
        waiter = Waiter(asyncio.get_running_loop())
        with self._lock:
            self._waiters.add(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._waiters.discard(waiter)


class Line:
    """A bell for those of whom each takes one thing away: a ring wakes the first in line for every kind of thing, and who
    gets one wakes the next. Five hundred workers that all looked whenever a unit came free kept the database busy with that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines = defaultdict[Hashable, dict[Waiter, None]](dict)
        self._timer: asyncio.TimerHandle | None = None
        self.closed = False

    def ring(self) -> None:
        """Wake the first in each line."""
        with self._lock:
            waiters = [next(iter(line)) for line in self._lines.values()]
        for waiter in waiters:
            waiter.wake()

    def ring_in(self, seconds: float) -> None:
        """Ring after `seconds`, unless that happens sooner anyway: who is woken then asks for the next time. On the event loop."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._ring_now)

    def _ring_now(self) -> None:
        self._timer = None
        self.ring()

    def close(self) -> None:
        """Wake everyone for good: the process is about to stop."""
        self.closed = True
        with self._lock:
            waiters = [waiter for line in self._lines.values() for waiter in line]
        for waiter in waiters:
            waiter.wake()

    @contextmanager
    def stand(self, kind: Hashable) -> Generator[Waiter]:
        """A waiter at the end of the line for `kind`, until the end of the block. Call it on the event loop.

        A ring that it heard is the next one's, unless it looked and found nothing (`Waiter.in_vain`).
        """
        waiter = Waiter(asyncio.get_running_loop())
        with self._lock:
            self._lines[kind][waiter] = None
        try:
            yield waiter
        finally:
            with self._lock:
                del self._lines[kind][waiter]
                following = next(iter(self._lines[kind]), None)
                if following is None:
                    del self._lines[kind]
            if following is not None and waiter.owes:
                following.wake()


class Waiter:
    """One who waits for a bell."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rung = asyncio.Event()
        self._rings = self._before_look = self._answered = 0

    @property
    def owes(self) -> bool:
        """Whether it was rung for and has not found since that there was nothing."""
        return self._rings != self._answered

    def in_vain(self) -> None:
        """Note that it looked, since the last `heard`, and found nothing. A ring during the look is not answered by that."""
        self._answered = self._before_look

    def wake(self) -> None:
        """Note a ring; from any thread."""
        self._rings += 1
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._rung.set)

    async def heard(self, timeout_s: float) -> bool:
        """Wait for a ring since the last call, at most `timeout_s`; False when none came."""
        try:
            await asyncio.wait_for(self._rung.wait(), timeout_s)
        except TimeoutError:
            return False
        finally:
            self._before_look = self._rings
            self._rung.clear()
        return True
