"""Everything that one API process consists of, put together in one place.

What is chosen by the deployment (store, database) or belongs to a heavier module (preflight, reduce) comes in as an
argument, so that tests and other deployments bring their own.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request

from aerie_api.bell import Bell, Line
from aerie_api.broker import Broker, CeleryBroker
from aerie_api.db import Database, Topic
from aerie_api.drafters.service import DrafterService
from aerie_api.jobs.artifacts import ArtifactService
from aerie_api.jobs.checkpoints import CheckpointService
from aerie_api.jobs.idempotency import Idempotency
from aerie_api.jobs.reading import ReadingService
from aerie_api.jobs.service import JobService, Preflight, Preflighted
from aerie_api.leases.claims import Claims
from aerie_api.leases.lending import Lending
from aerie_api.leases.outbox import Outbox, Ringer
from aerie_api.leases.planner import Planner, Reduce
from aerie_api.leases.reaper import Reaper
from aerie_api.leases.retries import Rules
from aerie_api.leases.vetting import Vetting
from aerie_api.settings import Settings
from aerie_api.storage.budget import Budgets
from aerie_api.storage.retention import Keeping
from aerie_api.storage.service import StorageService
from aerie_api.tenants.buckets import DatabaseBuckets, MemoryBuckets, Rate
from aerie_api.tenants.gate import Gate
from aerie_api.tenants.service import TenantService
from aerie_api.workers.service import WorkerService
from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import StageName
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.objects.location import store_at
from eagle3_core.objects.protocol import ObjectStore

if TYPE_CHECKING:
    from eagle3_core.jobs.inspection import Inspection
logger = logging.getLogger(__name__)


class WeakToken(AerieError):
    """The worker token is too short to be a secret."""

    code, status = "settings.worker_token", 422


class CoreInspection:
    """The real look at verifier and data, in confined processes. Made at the first job: it brings numpy and tokenizers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._made: Inspection | None = None

    def __call__(self, spec: JobSpec, roots: Sequence[Path]) -> Preflighted:
        """What preflight finds."""
        with self._lock:
            if self._made is None:
                from eagle3_core.jobs.inspection import Inspection

                given = self._settings
                self._made = Inspection(cpu_s=given.preflight_cpu_s, memory_bytes=given.preflight_memory_bytes)
        return self._made(spec, roots)

    def close(self) -> None:
        """End the processes."""
        if self._made is not None:
            self._made.close()


def core_reduce(stage: StageName, spec: JobSpec, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The real reduction. Imported when first needed: it brings numpy."""
    from eagle3_core.jobs.results import reduce

    return reduce(stage, spec, results)


@dataclass(frozen=True)
class Parts:
    """What a process takes from outside."""

    preflight: Preflight | None = None
    """Default: the real look at verifier and data, in confined processes."""
    reduce: Reduce = core_reduce
    clock: Callable[[], float] = time.time
    store: ObjectStore | None = None
    """Default: the store that the settings name."""
    broker: Broker | None = None
    """Default: Celery's, where the settings name a broker."""
    reaper: bool = True
    """Whether the reaper's and the ringer's threads run; tests call `claims.reap` themselves."""


class House:
    """The services of one process, over one database."""

    def __init__(self, settings: Settings, parts: Parts) -> None:
        self.settings = settings
        self.clock = parts.clock
        self.work, self.news, self.stops = Line(), Bell(), Bell()
        self.bells: dict[Topic, Bell | Line] = {"work": self.work, "news": self.news, "stops": self.stops}
        self.ringer: Ringer | None = None
        self.room_keeper = Reaper(lambda: self.tend(self.storage.room.watch), settings.room_interval_s)
        self.worker_token = worker_token(settings.token_file)
        self.store = parts.store or store_at(settings.store_url)
        self.db = Database(settings.database, self._ring, settings.database_connections)
        vetting = Vetting(self.store)
        budgets = Budgets(settings.tenant_store_bytes)
        planner = Planner(parts.reduce, vetting.intact, lambda: self.store.free_bytes(), budgets, parts.clock)
        rules = Rules(
            settings.lease_s, settings.max_attempts, settings.max_losses, settings.retry_base_s, settings.retry_max_s
        )
        self.idempotency = Idempotency(self.db, settings.idempotency_s, parts.clock)
        self.lending = Lending(self.db, planner, self.store, settings.lend_s)
        self._inspection = CoreInspection(settings)
        self.claims = Claims(self.db, planner, vetting, rules, parts.clock, settings.stuck_factor)
        self.jobs = JobService(
            self.db,
            planner,
            vetting,
            self.idempotency,
            parts.preflight or self._inspection,
            settings.roots,
            parts.clock,
        )
        self.reading = ReadingService(self.db)
        self.artifacts = ArtifactService(self.db, self.store, settings.presign_s)
        self.checkpoints = CheckpointService(self.db, self.store)
        self.drafters = DrafterService(self.db)
        self.workers = WorkerService(self.db, parts.clock)
        self.broker = parts.broker or (
            CeleryBroker(settings.broker, settings.broker_prefix) if settings.broker else None
        )
        if self.broker is not None:
            outbox = Outbox(self.db, self.broker, settings.ring_again_s, parts.clock)
            self.ringer = Ringer(outbox, settings.ring_again_s)
        keeping = Keeping(
            settings.collect_grace_s,
            settings.checkpoint_grace_s,
            settings.retain_states_s,
            settings.room_bytes,
        )
        self.storage = StorageService(self.db, self.store, planner, keeping, budgets, parts.clock)
        self.keepers = [
            Reaper(lambda: self.tend(self.storage.keep_order), settings.collect_interval_s),
            self.room_keeper,
        ]
        self.tenants = TenantService(self.db, parts.clock)
        buckets = DatabaseBuckets(self.db, parts.clock) if self.db.shared else MemoryBuckets(parts.clock)
        rate = Rate(settings.rate_burst, settings.rate_per_minute) if settings.rate_per_minute else None
        self.gate = Gate(self.db, buckets, rate, parts.clock, required=settings.asks_for_keys)
        self.reaper = Reaper(self.sweep, settings.reaper_interval_s)
        self.watched = parts.reaper
        """Whether the reaper is meant to run."""

    def _ring(self, topic: Topic) -> None:
        if topic == "room":
            self.room_keeper.hint()
            return
        self.bells[topic].ring()
        if topic == "work" and self.ringer is not None:
            self.ringer.hint()

    def open(self) -> None:
        """Begin: make good what the process's absence cost, then watch the leases."""
        self.gate.make_first_key(self.settings.first_key_file)
        self.claims.extend_all()
        self.idempotency.forget_unanswered()
        if self.watched:
            self.reaper.start()
            if self.ringer is not None:
                self.ringer.start()
            for keeper in self.keepers:
                keeper.start()

    def sweep(self) -> None:
        """One pass of the reaper, unless another process is at it."""
        with self.db.alone("reaper") as alone:
            if alone:
                self.claims.reap()
                self.idempotency.sweep()

    def tend(self, duty: Callable[[], object]) -> None:
        """One round of a duty towards the store. A store that is away is told and tried again in the next round."""
        try:
            duty()
        except AerieError as error:
            logger.warning("the store's housekeeping: %s", error.text())

    def close(self) -> None:
        """End."""
        for bell in self.bells.values():
            bell.close()
        self.reaper.stop()
        if self.ringer is not None:
            self.ringer.stop()
        self._inspection.close()
        for keeper in self.keepers:
            keeper.stop()
        self.db.close()


async def house_of(request: Request) -> House:
    """The house that serves `request`. A coroutine, as all our dependencies are: others cost a thread for each request."""
    return request.app.state.house


def worker_token(path: Path) -> str:
    """The worker token in `path`, made there (readable by its owner only) if there is none. Raises WeakToken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        token = path.read_text().strip()
    else:
        token = secrets.token_urlsafe(32)
        with os.fdopen(descriptor, "w") as file:
            file.write(token + "\n")
    if len(token) < 16:
        raise WeakToken(
            f"{path} holds {len(token)} characters",
            remedy="delete the file (a new token is made), or put 16 or more in",
        )
    return token
