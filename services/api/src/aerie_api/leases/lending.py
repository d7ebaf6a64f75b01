"""Lends the object store to units' processes that have no key to it: one signed request for one object at a time.

What a process may ask is decided by the attempt that it runs, and by nothing that it says:

    read      the objects of the attempts that made its inputs, and its own
    write     keys of its own attempt, which nobody reads before its commit; checkpoints of its own training
    remove    the same; packaging also the checkpoints of the training that it ends

An object's key names the attempt that wrote it, and a commit that lists another attempt's objects is refused
(`leases.vetting`), so keys alone decide and the store is not read for it. Another tenant's object is not there, like anything
else that is not lent. Requests are signed outside of every transaction. One that was signed outlives the
attempt by `AERIE_LEND_S` at most: long enough for a part on a slow line, and whatever it writes by then is nobody's data.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from sqlalchemy.orm import Session

from aerie_api.db import Database
from aerie_api.jobs.repository import JobMissing, JobRepository
from aerie_api.leases.claims import gone, over, unknown
from aerie_api.leases.planner import Planner
from aerie_api.leases.repository import UnitRepository
from aerie_api.tables import Unit
from eagle3_core.errors import AerieError
from eagle3_core.jobs.states import UnitState
from eagle3_core.jobs.wire import ObjectAnswer, ObjectAsk
from eagle3_core.objects.keys import Attempt, Owner, Training, owner_of
from eagle3_core.objects.protocol import Lends, ObjectStore

REMEMBERED = 1024
"""Attempts whose rights are kept in memory: they never change, and a training reads the units of all its states for them."""


class StoreNotLent(AerieError):
    """The object store cannot be lent to a worker that has no key to it."""

    code, status = "store.not_lent", 409


class ObjectNotLent(AerieError):
    """The unit has nothing to do with the object that its process asks for."""

    code, status = "object.not_lent", 403


@dataclass(frozen=True)
class Rights:
    """What one attempt may do."""

    inputs: frozenset[Owner]
    own: frozenset[Owner]
    """Where it writes."""
    ends: frozenset[Owner]
    """What it may list and remove beyond that."""

    def allow(self, ask: ObjectAsk) -> bool:
        """Whether it may do what `ask` says."""
        if ask.do == "list":
            return any(ask.key.startswith(owner.prefix) for owner in self.own | self.ends)
        owner = owner_of(ask.key)
        if owner is None:
            return False
        if ask.do == "get":
            return owner in self.own | self.ends | self.inputs
        return owner in self.own | (self.ends if ask.do == "delete" else frozenset())


class Lending:
    """Signs what a unit's process may ask of `store`, for `lasts_s` seconds (0: nothing)."""

    def __init__(self, db: Database, planner: Planner, store: ObjectStore, lasts_s: int) -> None:
        self._db = db
        self._planner = planner
        self._store = store
        self._lasts_s = lasts_s
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, int], Rights] = OrderedDict()

    def lender(self) -> Lends:
        """The store, if it can be lent. Raises StoreNotLent."""
        if self._lasts_s and isinstance(self._store, Lends):
            return self._store
        raise StoreNotLent(
            "the API's object store is a folder, which cannot be lent" if self._lasts_s else "AERIE_LEND_S is 0",
            remedy="let AERIE_STORE of the worker name the store, and give it credentials where it needs some",
        )

    def ask(self, unit_id: str, token: str, ask: ObjectAsk) -> ObjectAnswer:
        """What the process of a unit asks for. Raises UnknownToken, LeaseLost, ObjectNotLent, StoreNotLent, BadKey."""
        with self._db.read() as session:
            unit = self._held(session, unit_id, token)
            rights = self._rights(session, unit)
            whose = f"{unit.stage} unit {unit.index}"
        if not rights.allow(ask):
            raise ObjectNotLent(
                f"{whose} may not {ask.do} {ask.key!r}",
                remedy="a unit reads what its inputs' manifests list and writes under keys of its own attempt",
            )
        return self.lender().lend(ask, self._lasts_s)

    @staticmethod
    def _held(session: Session, unit_id: str, token: str) -> Unit:
        """The unit, if `token` is that of the attempt that holds it. Raises UnknownToken, LeaseLost."""
        units = UnitRepository(session)
        unit, attempt = units.get(unit_id), units.attempt_of(unit_id, token)
        if unit is None:
            raise gone(unit_id)
        if attempt is None:
            raise unknown(unit_id)
        if (unit.state, unit.fence) != (UnitState.RUNNING, attempt.fence):
            raise over(unit, attempt)
        return unit

    def _rights(self, session: Session, unit: Unit) -> Rights:
        place = (unit.id, unit.fence)
        with self._lock:
            if place in self._known:
                self._known.move_to_end(place)
                return self._known[place]
        rights = self._decided(session, unit)
        with self._lock:
            self._known[place] = rights
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return rights

    def _decided(self, session: Session, unit: Unit) -> Rights:
        try:
            job = JobRepository(session, unit.tenant).get(unit.job_id)
        except JobMissing:
            raise gone(unit.id) from None
        inputs = self._planner.inputs(session, job, unit)
        made = {owner_of(ref.key) for refs in inputs.values() for ref in refs}
        # The states that answers are made with are kept as extract's output (`stages.generate`).
        stages = {unit.stage} | ({"extract"} if unit.stage == "generate" else set())
        own = {Attempt(unit.tenant, stage, unit.job_id, unit.index, unit.fence) for stage in stages}
        ends = set[Owner]()
        if unit.stage == "package":
            trained = UnitRepository(session, unit.tenant).of_stage(unit.job_id, "train")
            ends = {Training(unit.tenant, train.key) for train in trained}
        return Rights(
            frozenset(owner for owner in made if owner is not None),
            frozenset(own | ({Training(unit.tenant, unit.key)} if unit.stage == "train" else set())),
            frozenset(ends),
        )
