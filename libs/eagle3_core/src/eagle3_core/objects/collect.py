"""Takes away what no commit lists and no attempt can list any more.

Safe at any moment, beside any number of writers and other collectors, without a lock, because of one order: first keys
are listed, then the truth is asked, then what it does not know is deleted. A key is written by one attempt only
(`objects.keys`), and an attempt that is over never comes back. So a key that was there before the truth was asked, and
that is neither committed nor of an attempt in flight when it was asked, will never be data. The grace period on top is
for people: it is how long a mistake in the database can be undone.

What the truth cannot tell apart is kept: a committed manifest that cannot be read protects all keys of its attempt, and
what has no owner is not ours.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from eagle3_core.jobs.wire import ManifestRef
from eagle3_core.objects.keys import HOUSE_PREFIX, Owner, Training, new_nonce, owner_of
from eagle3_core.objects.manifest import read_manifest
from eagle3_core.objects.protocol import BadKey, ObjectDamaged, ObjectMissing, ObjectStore, Stat, StoreFull

BATCH_KEYS = 1000
KNOWN_MANIFESTS = 20_000
"""Manifests remembered between batches and passes: they never change."""
LEFTOVERS = (f"{HOUSE_PREFIX}probe/", f"{HOUSE_PREFIX}now/")
"""Notes that a process which died may have left."""


@dataclass(frozen=True)
class Holdings:
    """What the database holds of some owners, at one moment."""

    committed: Sequence[ManifestRef]
    """Every manifest that a result or a unit still points to."""
    in_flight: frozenset[Owner]
    """Attempts that may still commit, and trainings that may go on from their checkpoints."""


class Truth(Protocol):
    """Whoever knows what is committed."""

    def about(self, owners: Collection[Owner]) -> Holdings:
        """What is held of `owners` now."""
        ...


@dataclass
class Swept:
    """What a pass saw and did."""

    seen: int = 0
    """Keys of ours."""
    seen_bytes: int = 0
    young: int = 0
    """Uncommitted, and not old enough."""
    deleted: int = 0
    deleted_bytes: int = 0
    strange: int = 0
    """Keys that are not ours: left alone."""
    unreadable: list[str] = field(default_factory=list[str])
    """Committed manifests that cannot be read; what their attempts wrote is kept."""


class Collector:
    """Finds and deletes garbage in `store`, as `truth` has it."""

    def __init__(self, store: ObjectStore, truth: Truth, *, grace_s: float, checkpoint_grace_s: float) -> None:
        """`grace_s`: least age of an uncommitted object; `checkpoint_grace_s`: of a checkpoint that nobody needs."""
        self._store, self._truth = store, truth
        self._grace_s, self._checkpoint_grace_s = grace_s, checkpoint_grace_s
        self._known: dict[str, frozenset[str]] = {}

    def collect(self) -> Swept:
        """One pass over the whole store. Raises StoreUnavailable; what was done until then stays done."""
        swept, now = Swept(), store_time(self._store)
        for batch in self.garbage("", swept, now):
            for stat in batch:
                self._store.delete(stat.key)
                swept.deleted += 1
                swept.deleted_bytes += stat.size
        return swept

    def garbage(self, prefix: str, swept: Swept, now: float | None) -> Iterator[list[Stat]]:
        """What may be deleted under `prefix`, batch by batch; each is to be deleted before the next one is asked for.

        `now` is the store's time, against which ages are held; None asks for no age.
        """
        listing = iter(self._store.list(prefix))
        while batch := list(islice(listing, BATCH_KEYS)):
            owned = [(stat, owner) for stat in batch if (owner := owner_of(stat.key)) is not None]
            swept.seen += len(owned)
            swept.seen_bytes += sum(stat.size for stat, _ in owned)
            kept = self._kept({owner for _, owner in owned}, swept)
            found = [stat for stat, owner in owned if owner not in kept.owners and stat.key not in kept.keys]
            old = [stat for stat in found if now is None or now - stat.modified > self._grace(stat)]
            swept.young += len(found) - len(old)
            leftovers = [s for s in batch if now and s.key.startswith(LEFTOVERS) and now - s.modified > self._grace_s]
            swept.strange += len(batch) - len(owned) - sum(s.key.startswith(HOUSE_PREFIX) for s in batch)
            yield old + leftovers

    def _grace(self, stat: Stat) -> float:
        return self._checkpoint_grace_s if isinstance(owner_of(stat.key), Training) else self._grace_s

    def _kept(self, owners: set[Owner], swept: Swept) -> _Kept:
        """What of `owners` must stay. Asks the truth, and so comes after the listing."""
        holdings = self._truth.about(owners)
        kept = _Kept(set(holdings.in_flight), set())
        for ref in holdings.committed:
            owner = owner_of(ref.key)
            if owner is None or owner not in owners or owner in kept.owners:
                continue
            kept.keys.add(ref.key)
            files = self._files(ref)
            if files is None:
                kept.owners.add(owner)
                swept.unreadable.append(ref.key)
            else:
                kept.keys |= files
        return kept

    def _files(self, ref: ManifestRef) -> frozenset[str] | None:
        """The keys that a committed manifest lists; None where it cannot be read."""
        if ref.key not in self._known:
            try:
                manifest = read_manifest(self._store, ref)
            except (ObjectMissing, ObjectDamaged, BadKey):
                return None
            if len(self._known) >= KNOWN_MANIFESTS:
                self._known.clear()
            self._known[ref.key] = frozenset(entry.key for entry in manifest.files)
        return self._known[ref.key]


@dataclass
class _Kept:
    owners: set[Owner]
    """All of whose keys stay."""
    keys: set[str]


def store_time(store: ObjectStore) -> float:
    """The store's own time, in seconds since the epoch: ages are held against the clock that wrote them.

    A store too full for an empty object is cleared by this machine's clock: ages are a grace, not what makes it safe.
    """
    key = f"{HOUSE_PREFIX}now/{new_nonce()}"
    try:
        store.put_bytes(key, b"")
    except StoreFull:
        return time.time()
    try:
        return store.stat(key).modified
    finally:
        store.delete(key)
