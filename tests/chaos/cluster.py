"""A house of real parts that outlives every run: API and workers kept alive by `aerie up`, PostgreSQL, Redis, an S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from house import House, running_house

from chaos.parts import Blow, Clock, Part, Postgres, Processes, Redis, Store


@dataclass(frozen=True)
class Cluster:
    """A running house and what of it can be hit."""

    house: House
    parts: tuple[Part, ...]
    database: Postgres
    store: Store

    @property
    def blows(self) -> dict[str, Blow]:
        """Everything that can happen, by name."""
        return {blow.name: blow for part in self.parts for blow in part.blows()}


@contextmanager
def running_cluster(folder: Path, inputs: Path, workers: int = 2) -> Iterator[Cluster]:
    """The cluster form: PostgreSQL, Redis, an S3 server, and a house that lives on them."""
    database, store = Postgres(folder / "postgres"), Store(folder / "store")
    parts: tuple[Part, ...] = (
        Processes(),
        Redis(folder / "redis", database.units_of_living_jobs),
        Clock(folder),
        database,
        store,
    )
    with ExitStack() as stack:
        environment: dict[str, str] = {}
        for part in parts:
            stack.callback(part.stop)
            part.start()
            environment |= part.environment()
        house = stack.enter_context(running_house(folder / "house", [inputs], workers, environment))
        yield Cluster(house, parts, database, store)
