"""A house of real parts that outlives every run: API and workers kept alive by `aerie up`, Redis, a store, a database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from house import House, running_house

from chaos.parts import Blow, Clock, Part, Processes, Redis, Sqlite
from eagle3_core.objects.location import store_at
from eagle3_core.objects.protocol import ObjectStore


@dataclass(frozen=True)
class Cluster:
    """A running house and what of it can be hit."""

    house: House
    parts: tuple[Part, ...]
    database: Sqlite
    store: ObjectStore

    @property
    def blows(self) -> dict[str, Blow]:
        """Everything that can happen, by name."""
        return {blow.name: blow for part in self.parts for blow in part.blows()}


@contextmanager
def running_cluster(folder: Path, inputs: Path, workers: int = 2) -> Iterator[Cluster]:
    """The cluster form with an embedded database and a local store: what every machine can run."""
    house_folder = folder / "house"
    database = Sqlite(house_folder)
    parts: tuple[Part, ...] = (Processes(), Redis(folder / "redis"), Clock(folder), database)
    with ExitStack() as stack:
        environment: dict[str, str] = {}
        for part in parts:
            part.start()
            stack.callback(part.stop)
            environment |= part.environment()
        house = stack.enter_context(running_house(house_folder, [inputs], workers, environment))
        yield Cluster(house, parts, database, store_at((house_folder / "objects").as_uri()))
