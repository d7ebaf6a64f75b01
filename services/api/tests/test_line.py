"""Those who stand in line for work: whatever rings, leaves or is too late, nothing stays while somebody waits for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from aerie_api.bell import Line, Waiter

FOREVER_S = 3600.0
KINDS = ("prep", "train")


@dataclass
class Shop:
    """Things of two kinds, and workers in line for them."""

    line: Line = field(default_factory=Line)
    stock: Counter[str] = field(default_factory=Counter[str])
    looks: int = 0
    taken: int = 0
    waiting: dict[asyncio.Task[None], str] = field(default_factory=dict[asyncio.Task[None], str])

    def come(self, kind: str) -> None:
        """One more worker."""
        task = asyncio.create_task(self._work(kind))
        self.waiting[task] = kind
        task.add_done_callback(self.waiting.pop)

    async def _work(self, kind: str) -> None:
        with self.line.stand(kind) as waiter:
            while not await self._look(kind, waiter):
                await waiter.heard(FOREVER_S)

    async def _look(self, kind: str, waiter: Waiter) -> bool:
        self.looks += 1
        found = self.stock[kind] > 0
        if found:
            self.stock[kind] -= 1
            self.taken += 1
        await asyncio.sleep(0)  # the answer takes a while: somebody may ring meanwhile
        if not found:
            waiter.in_vain()
        return found

    def leave(self, which: int) -> None:
        """A worker hangs up, in the middle of whatever it does. What it had taken is gone with it."""
        if self.waiting:
            list(self.waiting)[which % len(self.waiting)].cancel()

    async def settle(self) -> None:
        """Until nobody has anything to do at once."""
        for _ in range(20 + 10 * len(self.waiting)):
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Send everybody home."""
        for task in list(self.waiting):
            task.cancel()
        await asyncio.gather(*self.waiting, return_exceptions=True)


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from(KINDS)),
        st.tuples(st.just("bring"), st.sampled_from(KINDS)),
        st.tuples(st.just("leave"), st.integers(0, 7)),
        st.tuples(st.just("turn"), st.integers(0, 3)),
    ),
    max_size=40,
)


@given(ACTS)
def test_nothing_stays_while_somebody_waits_for_it(acts):
    async def play() -> None:
        shop = Shop()
        for act, value in acts:
            if act == "come":
                shop.come(value)
            elif act == "bring":
                shop.stock[value] += 1
                shop.line.ring()
            elif act == "leave":
                shop.leave(value)
            else:
                for _ in range(value):
                    await asyncio.sleep(0)
        await shop.settle()
        for kind in KINDS:
            assert shop.stock[kind] == 0 or kind not in shop.waiting.values()
        await shop.close()

    asyncio.run(play())


def test_one_thing_more_costs_two_looks_however_many_wait():
    async def play() -> None:
        shop = Shop()
        for _ in range(200):
            shop.come("prep")
        await shop.settle()
        before = shop.looks
        shop.stock["prep"] += 1
        shop.line.ring()
        await shop.settle()
        assert shop.taken == 1
        assert shop.looks - before == 2, "who takes it, and the next, who finds nothing more"
        await shop.close()

    asyncio.run(play())


def test_a_ring_that_is_due_sooner_takes_the_place_of_a_later_one():
    async def play() -> None:
        shop = Shop()
        shop.come("train")
        await shop.settle()
        shop.stock["train"] += 1
        shop.line.ring_in(FOREVER_S)
        shop.line.ring_in(0.0)
        shop.line.ring_in(FOREVER_S)
        await asyncio.gather(*shop.waiting)
        assert shop.taken == 1

    asyncio.run(play())


def test_a_closed_line_wakes_everybody():
    async def play() -> None:
        line, home = Line(), list[int]()

        async def wait(number: int) -> None:
            with line.stand("prep") as waiter:
                while not line.closed:
                    await waiter.heard(FOREVER_S)
                home.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(5)]
        await asyncio.sleep(0)
        line.close()
        await asyncio.gather(*tasks)
        assert sorted(home) == [0, 1, 2, 3, 4]

    asyncio.run(play())
