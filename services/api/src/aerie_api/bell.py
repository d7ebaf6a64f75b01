"""How a thread that changed the database wakes those who wait for a change.

Waiters live on the event loop and hold no thread: a hundred workers in a long poll cost a hundred futures. Whoever
waits registers first, looks second and sleeps third, so a change between looking and sleeping is not missed. A bell
is a hint, never the truth: every waiter looks again after its time-out.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
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


class Waiter:
    """One who waits for a bell."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rung = asyncio.Event()

    def wake(self) -> None:
        """Note a ring; from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._rung.set)

    async def heard(self, timeout_s: float) -> bool:
        """Wait for a ring since the last call, at most `timeout_s`; False when none came."""
        try:
            await asyncio.wait_for(self._rung.wait(), timeout_s)
        except TimeoutError:
            return False
        self._rung.clear()
        return True
