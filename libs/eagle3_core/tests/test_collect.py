"""The collector takes garbage and nothing else: any history of attempts, deaths, commits and deletions, at any moment.

A machine plays workers and a database over a store. A collector's pass is broken into by whatever else the machine may
do: between its listing and its look at the truth, and before each deletion.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from eagle3_core.jobs.graph import StageName
from eagle3_core.jobs.wire import ManifestRef
from eagle3_core.objects import manifest
from eagle3_core.objects.collect import Collector, Holdings, Swept, store_time
from eagle3_core.objects.keys import HOUSE_PREFIX, Attempt, Owner, Training
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import FileEntry, UnitWriter, read_manifest
from eagle3_core.objects.protocol import ObjectMissing, ObjectStore, Stat
from eagle3_core.train.checkpoint import MARKER

GRACE_S = 100.0
EXAMPLES = int(os.environ.get("AERIE_TEST_EXAMPLES", "40"))
PICK = st.integers(0, 1 << 16)
ENDINGS = st.sampled_from(["commit", "commit", "commit", "die", "half", "go on", "go on"])


class Memory:
    """A store in a dict, with a clock that the test moves and a hook that lets others in before a deletion."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[bytes, float]] = {}
        self.now = 1_000.0
        self.before_delete: Callable[[], None] = lambda: None

    def put_bytes(self, key: str, data: bytes) -> None:
        self.held[key] = (data, self.now)

    def get_bytes(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.stat(key)
        return self.held[key][0]

    def stat(self, key: str) -> Stat:
        if key not in self.held:
            raise ObjectMissing(key)
        return Stat(key, len(self.held[key][0]), self.held[key][1])

    def list(self, prefix: str) -> Iterator[Stat]:
        for key in sorted(self.held):
            if key.startswith(prefix) and key in self.held:
                yield self.stat(key)

    def delete(self, key: str) -> None:
        if not key.startswith(HOUSE_PREFIX):
            self.before_delete()
        self.held.pop(key, None)


@dataclass
class Try:
    """An attempt that a worker makes."""

    attempt: Attempt
    writer: UnitWriter
    wrote: list[FileEntry] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    """Units with fences, their attempts, a table of commits, and collectors."""

    nonces: Iterator[int] = count()

    def __init__(self) -> None:
        super().__init__()
        type(self).nonces = count()
        self.store = Memory()
        self.fences: dict[tuple[str, str, int], int] = {}
        self.running: dict[tuple[str, str, int], Try] = {}
        self.zombies: list[Try] = []
        self.committed: dict[str, ManifestRef] = {}
        self.training = {Training("t", "unit-key")}
        self.before_look: Callable[[], None] = lambda: None
        self.after_look: Callable[[], None] = lambda: None
        self.collector = Collector(self.store, self, grace_s=GRACE_S, checkpoint_grace_s=3 * GRACE_S)  # type: ignore[arg-type]

    def about(self, owners: Collection[Owner]) -> Holdings:
        self.before_look()
        found = Holdings(
            list(self.committed.values()),
            frozenset({one.attempt for one in self.running.values()} | self.training),
        )
        self.after_look()
        return found

    # -- workers

    @rule(job=st.sampled_from("ab"), unit=st.integers(0, 1), shards=st.integers(1, 3), ending=ENDINGS)
    def work(self, job: str, unit: int, shards: int, ending: str) -> None:
        """A worker takes a unit, writes some shards, and commits, dies or goes on."""
        self.claim(job, unit, "extract")
        one = self.running[(job, "extract", unit)]
        one.wrote += [one.writer.add_bytes(f"shard-{i}", b"states") for i in range(shards)]
        pick = sorted(self.running).index((job, "extract", unit))
        {"commit": self.commit, "die": self.die, "half": self.write_a_manifest_and_die, "go on": lambda _: None}[
            ending
        ](pick)

    def claim(self, job: str, unit: int, stage: StageName) -> None:
        place = (job, stage, unit)
        if place in self.running:
            self.zombies.append(self.running.pop(place))
        self.fences[place] = self.fences.get(place, 0) + 1
        attempt = Attempt("t", stage, job, unit, self.fences[place])
        writer = UnitWriter(
            self.store, tenant="t", job_id=job, stage=stage, unit=(unit, 0, 1), unit_key="k", fence=attempt.fence  # type: ignore[arg-type]
        )  # fmt: skip
        self.running[place] = Try(attempt, writer)

    @rule(pick=PICK, content=st.sampled_from([b"x", b"states"]))
    def write(self, pick: int, content: bytes) -> None:
        everyone = [*self.running.values(), *self.zombies]
        if everyone:
            one = everyone[pick % len(everyone)]
            one.wrote.append(one.writer.add_bytes(f"shard-{len(one.wrote)}", content))

    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        if self.running:
            place = sorted(self.running)[pick % len(self.running)]
            ref = self.running.pop(place).writer.commit({})
            self.committed[ref.key] = ref

    def write_a_manifest_and_die(self, pick: int) -> None:
        if self.running:
            self.running.pop(sorted(self.running)[pick % len(self.running)]).writer.commit({})

    def die(self, pick: int) -> None:
        if self.running:
            self.zombies.append(self.running.pop(sorted(self.running)[pick % len(self.running)]))

    @rule(job=st.sampled_from("ab"), unit=st.integers(0, 1))
    def plan_a_unit_again(self, job: str = "a", unit: int = 0) -> None:
        """Its fences start again at 1, as those of a unit that was removed and made anew."""
        self.fences.pop((job, "extract", unit), None)
        if (old := self.running.pop((job, "extract", unit), None)) is not None:
            self.zombies.append(old)

    @rule(job=st.sampled_from("ab"), unit=st.integers(0, 1), shards=st.integers(1, 2))
    def work_for_long(self, job: str, unit: int, shards: int) -> None:
        self.work(job, unit, shards, "go on")
        self.store.now += 2 * GRACE_S

    @rule(step=st.integers(1, 3), unit_key=st.sampled_from(["unit-key", "done-key"]))
    def save_a_checkpoint(self, step: int, unit_key: str) -> None:
        prefix = Training("t", unit_key).prefix
        self.store.put_bytes(f"{prefix}{step:08d}-000001-00-state.safetensors", b"w")
        self.store.put_bytes(f"{prefix}{step:08d}-000001-{MARKER}", b"{}")

    # -- people and time

    @rule(pick=PICK)
    def forget_a_commit(self, pick: int) -> None:
        if self.committed:
            del self.committed[sorted(self.committed)[pick % len(self.committed)]]

    @rule()
    def finish_training(self) -> None:
        self.training.clear()

    @rule(seconds=st.sampled_from([1.0, GRACE_S / 2, GRACE_S + 1, 4 * GRACE_S]))
    def time_passes(self, seconds: float) -> None:
        self.store.now += seconds

    @rule(data=st.data())
    def collect(self, data: st.DataObject) -> None:
        """A pass; at each of its seams anything may happen, another pass included."""
        acts: list[Callable[[], None]] = [
            lambda: None, lambda: self.work("a", 0, 2, "go on"), lambda: self.work("a", 0, 2, "commit"),
            lambda: self.work("b", 0, 1, "commit"), lambda: self.write(0, b"x"), lambda: self.commit(0),
            lambda: self.die(0), self.plan_a_unit_again, lambda: self.forget_a_commit(0), self.quietly,
            lambda: self.time_passes(2 * GRACE_S), lambda: self.write_a_manifest_and_die(0),
        ]  # fmt: skip

        def anything() -> None:
            for act in data.draw(st.lists(st.sampled_from(acts), max_size=3)):
                act()
            self.nothing_that_counts_is_missing()

        self.before_look = self.after_look = self.store.before_delete = anything
        try:
            self.collector.collect()
        finally:
            self.before_look = self.after_look = self.store.before_delete = lambda: None

    def quietly(self) -> None:
        """A pass of another collector, undisturbed, in the middle of the first one's."""
        hooks = self.before_look, self.after_look, self.store.before_delete
        self.before_look = self.after_look = self.store.before_delete = lambda: None
        Collector(self.store, self, grace_s=GRACE_S, checkpoint_grace_s=3 * GRACE_S).collect()  # type: ignore[arg-type]
        self.before_look, self.after_look, self.store.before_delete = hooks

    # -- what must hold

    @initialize()
    def a_strangers_file_is_there(self) -> None:
        self.store.put_bytes("notes/readme.txt", b"mine")

    @invariant()
    def nothing_that_counts_is_missing(self) -> None:
        for ref in self.committed.values():
            for entry in read_manifest(self.store, ref).files:  # type: ignore[arg-type]
                assert self.store.stat(entry.key).size == entry.size, "a committed object is lost"
        for one in self.running.values():
            for entry in one.wrote:
                assert entry.key in self.store.held, "an attempt in flight lost what it wrote"
        assert "notes/readme.txt" in self.store.held

    def teardown(self) -> None:
        self.zombies += self.running.values()
        self.running.clear()
        self.training.clear()
        self.store.now += 4 * GRACE_S
        swept = self.collector.collect()
        wanted = {entry.key for ref in self.committed.values() for entry in read_manifest(self.store, ref).files}  # type: ignore[arg-type]
        assert set(self.store.held) == {*wanted, *self.committed, "notes/readme.txt"}, "garbage is left"
        assert swept.unreadable == []


def test_whatever_happens_no_committed_object_is_lost_and_no_garbage_stays(monkeypatch: pytest.MonkeyPatch):
    # Keys hold nonces, and digests of manifests that say the time: their order decides what is drawn, so it must not be chance.
    monkeypatch.setattr(manifest, "time", SimpleNamespace(time=lambda: 1_000.0))
    monkeypatch.setattr(manifest, "new_nonce", lambda: f"{next(Machine.nonces):08x}")
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=40, deadline=None, print_blob=True, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


class Knows:
    """A truth that is told to the test."""

    def __init__(self, committed: list[ManifestRef], in_flight: Collection[Owner] = ()) -> None:
        self.committed, self.in_flight = committed, frozenset(in_flight)

    def about(self, owners: Collection[Owner]) -> Holdings:
        return Holdings(self.committed, self.in_flight)


def unit(store: ObjectStore, unit_index: int, fence: int = 1) -> tuple[ManifestRef, list[str]]:
    """A whole unit's output: its manifest and all of its keys."""
    writer = UnitWriter(
        store, tenant="t", job_id="j", stage="extract", unit=(unit_index, 0, 1), unit_key="k", fence=fence
    )
    keys = [writer.add_bytes(f"shard-{i}", bytes([i]) * 10).key for i in range(3)]
    ref = writer.commit({})
    return ref, [*keys, ref.key]


def test_on_every_store_garbage_goes_and_commits_stay(store: ObjectStore):
    ref, committed = unit(store, 0)
    _, dead = unit(store, 1)
    _, flying = unit(store, 2)
    collector = Collector(
        store, Knows([ref], [Attempt("t", "extract", "j", 2, 1)]), grace_s=-60, checkpoint_grace_s=-60
    )

    swept = collector.collect()

    assert [s.key for s in store.list("")] == sorted([*committed, *flying])
    assert (swept.deleted, swept.seen, swept.unreadable) == (len(dead), 12, [])


def test_what_is_young_stays_and_is_counted(store: ObjectStore):
    _, keys = unit(store, 0)

    swept = Collector(store, Knows([]), grace_s=3600, checkpoint_grace_s=3600).collect()

    assert (swept.deleted, swept.young) == (0, len(keys))


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_a_commit_whose_manifest_cannot_be_read_keeps_all_its_attempt_wrote(tmp_path: Path, damage: str):
    store = LocalStore(tmp_path)
    ref, keys = unit(store, 0)
    store.delete(ref.key) if damage == "gone" else store.put_bytes(ref.key, b"{}")

    swept = Collector(store, Knows([ref]), grace_s=-60, checkpoint_grace_s=-60).collect()

    assert (swept.deleted, swept.unreadable) == (0, [ref.key])
    assert set(keys) - {ref.key} <= {s.key for s in store.list("")}


def test_an_orphan_inside_a_committed_attempt_goes(tmp_path: Path):
    store = LocalStore(tmp_path)
    ref, keys = unit(store, 0)
    _, same_place = unit(store, 0)  # another writer, the same unit and fence

    Collector(store, Knows([ref]), grace_s=-60, checkpoint_grace_s=-60).collect()

    assert [s.key for s in store.list("")] == sorted(keys)
    assert not set(keys) & set(same_place)


def test_ages_are_held_against_the_stores_own_clock():
    store = Memory()
    store.now = 5e9  # a store that lives in the future
    _, keys = unit(store, 0)  # type: ignore[arg-type]
    collector = Collector(store, Knows([]), grace_s=GRACE_S, checkpoint_grace_s=GRACE_S)  # type: ignore[arg-type]

    assert collector.collect().deleted == 0
    store.now += GRACE_S + 1
    assert collector.collect().deleted == len(keys)
    assert store_time(store) == store.now  # type: ignore[arg-type]
    assert store.held == {}


def test_notes_that_dead_processes_left_go_and_the_owners_name_stays(tmp_path: Path):
    store = LocalStore(tmp_path)
    for key in (f"{HOUSE_PREFIX}probe/1", f"{HOUSE_PREFIX}now/2", f"{HOUSE_PREFIX}owner/3"):
        store.put_bytes(key, b"")

    swept = Collector(store, Knows([]), grace_s=-60, checkpoint_grace_s=-60).collect()

    assert [s.key for s in store.list("")] == [f"{HOUSE_PREFIX}owner/3"]
    assert swept.strange == 0


def test_a_sweep_below_a_prefix_looks_nowhere_else(tmp_path: Path):
    store = LocalStore(tmp_path)
    _, one = unit(store, 1)
    _, two = unit(store, 2)
    swept = Swept()
    collector = Collector(store, Knows([]), grace_s=3600, checkpoint_grace_s=3600)

    found = [stat.key for batch in collector.garbage("t/extract/j/00001/", swept, None) for stat in batch]

    assert found == sorted(one)
    assert not set(found) & set(two)
