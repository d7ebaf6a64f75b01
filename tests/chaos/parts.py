"""What a cluster is made of and can be hit at: each part brings its settings and its blows.

A blow is one event that an operator fears. It returns what it did, in words, for the run's record. Another database or
store is another part: it needs `environment`, `blows`, and to be started and stopped around the house.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import psycopg
from house import House, wait_for
from servers import postgres as postgres_server
from servers import redis as redis_server
from servers import s3 as s3_server
from servers.faults import FaultProxy, Schedule

from aerie_api.broker import BrokerAway, CeleryBroker, Ring
from eagle3_core.objects.location import store_at
from eagle3_core.objects.protocol import ObjectStore

QUEUES = ("prep", "extract", "train", "evaluate")
LEASE_S = 12.0
"""Short, so that what takes a lost lease (a silent worker's unit for another one) fits into a run."""
LOSABLE_S = 10.0
"""How long it is looked for a ring that waits: a worker that is free takes it at once."""
Strike = Callable[[House, random.Random], str]
"""Says what it did; `Missed` where there was nothing to hit."""


class Missed(str):
    """What a blow says that hit nothing."""

    __slots__ = ()


@dataclass(frozen=True)
class Blow:
    """One kind of event."""

    name: str
    strike: Strike


class Part(Protocol):
    """Something of the cluster that can be hit."""

    def start(self) -> None:
        """Bring it up."""
        ...

    def stop(self) -> None:
        """Take it down."""
        ...

    def environment(self) -> Mapping[str, str]:
        """What every process of the house is told of it."""
        ...

    def blows(self) -> list[Blow]:
        """What can happen to it."""
        ...


class Processes:
    """API, workers and their children."""

    def start(self) -> None:
        """They are started with the house."""

    def stop(self) -> None:
        """They end with the house."""

    def environment(self) -> Mapping[str, str]:
        """Short leases, quick retries, and a garbage collector that takes at once whatever it may."""
        return {
            "AERIE_LEASE_S": f"{LEASE_S}", "AERIE_MAX_LOSSES": "100", "AERIE_RETRY_MAX_S": "2",
            "AERIE_COLLECT_INTERVAL_S": "2", "AERIE_COLLECT_GRACE_S": "0", "AERIE_CHECKPOINT_GRACE_S": "0",
        }  # fmt: skip

    def blows(self) -> list[Blow]:
        """Death, a polite stop, and a worker that comes back from the dead."""
        kills = [Blow(f"kill {part}", lambda house, _, part=part: self.kill(house, part)) for part in House.PARTS]
        return [*kills, Blow("stop worker", self.stop_worker), Blow("freeze worker", self.freeze_worker)]

    def kill(self, house: House, part: str) -> str:
        """`kill -9` every process of `part`."""
        return f"killed {len(wait_for(f'a living {part}', lambda: house.kill(part)))}"

    def stop_worker(self, house: House, rng: random.Random) -> str:
        """SIGTERM to one worker, as a node that drains sends."""
        pid = self.one(house, "worker", rng)
        os.kill(pid, signal.SIGTERM)
        return "asked one to stop"

    def freeze_worker(self, house: House, rng: random.Random) -> str:
        """Stop a worker for longer than its lease, so that two work on one unit and the first wakes up a stranger."""
        pid = self.one(house, "worker", rng)
        os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(1.5 * LEASE_S)  # the fault itself: silence for so long
        os.kill(pid, signal.SIGCONT)
        return "froze one for one and a half leases"

    @staticmethod
    def one(house: House, part: str, rng: random.Random) -> int:
        """A living process of `part`."""

        def living() -> list[int]:
            return sorted(pid for pid, command in house.descendants().items() if House.PARTS[part] in command)

        return rng.choice(wait_for(f"a living {part}", living))


class Redis:
    """The broker. `waiting` names the units of living jobs, with their queues."""

    def __init__(self, folder: Path, waiting: Callable[[], list[tuple[Any, ...]]]) -> None:
        self._folder = folder
        self._waiting = waiting
        self.server: redis_server.Redis | None = None

    def start(self) -> None:
        """Start it, and a connection that rings as a stranger would."""
        self.server = redis_server.start(self._folder)
        self.broker = CeleryBroker(self.server.url)

    def stop(self) -> None:
        """End it."""
        if self.server is not None:
            self.broker.close()
            self.server.stop()

    def environment(self) -> Mapping[str, str]:
        """The broker's URL, for both ends."""
        assert self.server is not None
        return {"AERIE_DOORBELL": "celery", "AERIE_BROKER_URL": self.server.url, "AERIE_RING_AGAIN_S": "2"}

    def blows(self) -> list[Blow]:
        """Everything forgotten, a power cut, a time away, rings lost and rings doubled."""
        return [
            Blow("flush redis", self.flush),
            Blow("restart redis", self.restart),
            Blow("redis away", self.away),
            Blow("lose rings", self.lose),
            Blow("double rings", self.double),
        ]

    def flush(self, _house: House, _rng: random.Random) -> str:
        """FLUSHALL."""
        self._server.flush()
        return "forgot everything"

    def restart(self, _house: House, _rng: random.Random) -> str:
        """Killed and started again."""
        self._server.restart()
        return "killed and started again"

    def away(self, _house: House, rng: random.Random) -> str:
        """Killed, and started again only after a while."""
        seconds = rng.uniform(2, 6)
        self._server.kill()
        threading.Event().wait(seconds)  # the fault itself: nobody there for so long
        self._server.start()
        return f"away for {seconds:.1f} s"

    def lose(self, _house: House, _rng: random.Random) -> str:
        """Every ring that waits, as soon as one does."""
        queues = [f"aerie:{queue}" for queue in QUEUES]
        tick = threading.Event()
        with self._server.client() as client:
            for _ in range(int(LOSABLE_S / 0.02)):
                if lost := sum(int(client.llen(queue)) for queue in queues):
                    client.delete(*queues)
                    return f"lost {lost}"
                tick.wait(0.02)
        return Missed(f"no ring waited in {LOSABLE_S:.0f} s")

    def double(self, _house: House, rng: random.Random) -> str:
        """Twice for every unit of a living job, whether it waits, runs or is done, and for units that never were."""
        units = [Ring(str(unit), str(queue)) for unit, queue in self._waiting()]
        rings = [*units, *units, *(Ring(f"unit_{rng.randbytes(12).hex()}", queue) for queue in QUEUES)]
        rng.shuffle(rings)
        try:
            self.broker.send(rings)
        except BrokerAway:
            self.broker.send(rings)  # the connection was from before its last restart
        said = f"rang twice for {len(units)} units, once for {len(QUEUES)} that never were"
        return said if units else Missed(said)

    @property
    def _server(self) -> redis_server.Redis:
        assert self.server is not None
        return self.server


class Clock:
    """The wall clock of workers and children."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"

    def start(self) -> None:
        """Show the true time."""
        self._file.write_bytes(struct.pack("d", 0.0))

    def stop(self) -> None:
        """Nothing runs."""

    def environment(self) -> Mapping[str, str]:
        """Where the offset lies, and the hook that follows it."""
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent / "clock"), os.environ.get("PYTHONPATH")]))
        return {"AERIE_TEST_CLOCK": str(self._file), "PYTHONPATH": path}

    def blows(self) -> list[Blow]:
        """A jump into the past or the future."""
        return [Blow("clock jumps", self.jump)]

    def jump(self, _house: House, rng: random.Random) -> str:
        """Set the workers' clocks off by up to a day."""
        seconds = rng.choice([-86400.0, -3600.0, -61.0, 61.0, 3600.0, 86400.0])
        with self._file.open("r+b") as file:
            file.write(struct.pack("d", seconds))
        return f"workers' clocks off by {seconds:+.0f} s"


class Postgres:
    """The database, killed as a machine that loses power, and the truth that a run is judged by."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.server: postgres_server.Postgres | None = None

    def start(self) -> None:
        """Start it, with an empty database."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.server = postgres_server.start(self._folder)
        self._url = self.server.database()

    def stop(self) -> None:
        """End it."""
        if self.server is not None:
            self.server.close()

    def environment(self) -> Mapping[str, str]:
        """Where it is."""
        return {"AERIE_DATABASE_URL": self._url}

    def blows(self) -> list[Blow]:
        """A power cut, and a polite restart that ends every session."""
        return [Blow("kill postgres", self.kill), Blow("restart postgres", self.restart)]

    def kill(self, _house: House, _rng: random.Random) -> str:
        """Every process of it by `kill -9`, and a start that has to recover."""
        self._server.kill()
        self._server.start()
        return "killed and started again"

    def restart(self, _house: House, _rng: random.Random) -> str:
        """Whoever is connected is thrown out."""
        self._server.stop()
        self._server.start()
        return "started again"

    def forget_results(self) -> None:
        """Empty the result cache, so that the next job runs every stage itself."""
        self._execute("DELETE FROM commits")

    def units_of_living_jobs(self) -> list[tuple[Any, ...]]:
        """Ids of units, with their queues, of jobs that have not ended."""
        return self.rows(
            "SELECT units.id, units.queue FROM units JOIN jobs ON jobs.id = units.job_id WHERE jobs.status IN ('queued', 'running')"
        )

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What the database itself says."""
        return self._execute(query, *values).fetchall()

    def _execute(self, query: str, *values: Any) -> psycopg.Cursor[Any]:
        with self._server.connect(self._url.rpartition("/")[2]) as connection:
            return connection.execute(query.encode(), values)

    @property
    def _server(self) -> postgres_server.Postgres:
        assert self.server is not None
        return self.server


class Store:
    """The object store, behind a proxy that can break what goes through it."""

    FAULTS: ClassVar[dict[str, str]] = {
        "slow_down": "503", "internal_error": "500", "reset": "reset", "half_upload": "half uploads",
        "lost_answer": "lost answers", "half_answer": "half answers", "slow": "slow", "flip": "flipped bits",
    }  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.server: s3_server.OwnServer | None = None

    def start(self) -> None:
        """Start the server and the proxy, which breaks nothing yet."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.server = s3_server.own(self._folder)
        self.proxy = FaultProxy(self.server.port, Schedule(0, share=0.0)).__enter__()

    def stop(self) -> None:
        """End both."""
        if self.server is not None:
            self.proxy.__exit__()
            self.server.stop()

    def environment(self) -> Mapping[str, str]:
        """Where it is, through the proxy, and the keys to it."""
        return {"AERIE_STORE": self._server.url("chaos", self.proxy.endpoint), **self._server.environment}

    def blows(self) -> list[Blow]:
        """Answers that fail in every way, and a server that dies."""
        faults = [
            Blow(f"store {name}", lambda house, rng, kind=kind: self.break_some(house, rng, kind))
            for kind, name in self.FAULTS.items()
        ]
        return [*faults, Blow("restart store", self.restart)]

    def break_some(self, _house: House, rng: random.Random, kind: str) -> str:
        """Break the next requests by `kind`, each at most twice in a row."""
        count = rng.randint(3, 20)
        self.proxy.schedule = Schedule(rng.randrange(1 << 30), [kind], share=0.7, limit=2, most=count)
        return f"the next {count}"

    def restart(self, _house: House, _rng: random.Random) -> str:
        """Killed and started again."""
        self._server.kill()
        self._server.start()
        return "killed and started again"

    def opened(self) -> ObjectStore:
        """The store itself, beside the proxy, for a look at what lies in it."""
        return store_at(self._server.url("chaos"), environment=self._server.environment)

    @property
    def _server(self) -> s3_server.OwnServer:
        assert self.server is not None
        return self.server
