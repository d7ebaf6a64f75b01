"""A house of real parts that outlives every run: API and workers kept alive by `aerie up`, PostgreSQL, Redis, an S3 server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from house import House, running_house

from chaos.parts import Blow, Clock, Part, Postgres, Processes, Redis, Store


class Cluster:
    """A running house and what of it can be hit."""

    house: House

    def __init__(
        self, folder: Path, inputs: Path, workers: int, parts: tuple[Part, ...], environment: Mapping[str, str]
    ) -> None:
        self._folder, self._inputs, self._workers = folder, inputs, workers
        self._environment = environment
        self.parts = parts
        self.database = next(part for part in parts if isinstance(part, Postgres))
        self.store = next(part for part in parts if isinstance(part, Store))
        self._running: AbstractContextManager[House] | None = None
        self._lent = False

    def start(self, *, lent: bool) -> None:
        """Have the house run, its workers with a key to the store or, where it is `lent`, without one: one that differs ends first."""
        if self._running is not None and self._lent == lent:
            return
        self.stop()
        told = {**self._environment, **({"AERIE_WORKER_STORE": "lent"} if lent else {})}
        running = running_house(self._folder / "house", [self._inputs], self._workers, told)
        self.house, self._running, self._lent = running.__enter__(), running, lent

    def stop(self) -> None:
        """End the house."""
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(None, None, None)

    @property
    def blows(self) -> dict[str, Blow]:
        """Everything that can happen, by name."""
        return {blow.name: blow for part in self.parts for blow in part.blows()}


@contextmanager
def running_cluster(folder: Path, inputs: Path, workers: int = 2) -> Iterator[Cluster]:
    """The cluster form: PostgreSQL, Redis, an S3 server, and a house that lives on them."""
    database = Postgres(folder / "postgres")
    parts: tuple[Part, ...] = (
        Processes(),
        Redis(folder / "redis", database.units_of_living_jobs),
        Clock(folder),
        database,
        Store(folder / "store"),
    )
    with ExitStack() as stack:
        environment: dict[str, str] = {}
        for part in parts:
            stack.callback(part.stop)
            part.start()
            environment |= part.environment()
        cluster = Cluster(folder, inputs, workers, parts, environment)
        stack.callback(cluster.stop)
        cluster.start(lent=False)
        yield cluster
