"""An S3 store behind a proxy that breaks four requests in ten: no damage is taken for data, nothing written is lost.

The server is real; the proxy resets, cuts, stalls and answers 503 by a seeded schedule (`tests/servers/faults.py`).
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from servers.faults import BROKEN, FaultProxy, Schedule
from servers.s3 import OwnServer, S3Server

from eagle3_core.digests import digest_bytes
from eagle3_core.objects.manifest import UnitWriter, fetch_file, read_manifest
from eagle3_core.objects.protocol import ObjectDamaged, StoreFull, StoreUnavailable
from eagle3_core.objects.retry import Retries
from eagle3_core.objects.s3 import S3Store
from eagle3_core.objects.s3_address import s3_address
from eagle3_core.objects.s3_clients import Patience
from eagle3_core.objects.s3_credentials import credentials_in

QUICK = Patience(connect_s=2.0, read_s=1.0, part_s=30.0, part_retries=3, part_pause_s=0.01)
AT_ONCE = Retries(attempts=8, sleep=lambda _: None)
PART = 5 << 20


class Bad:
    """A store whose requests are broken, and the same one untouched."""

    def __init__(self, server: S3Server, schedule: Schedule) -> None:
        if not isinstance(server, OwnServer):
            pytest.skip("the proxy stands before a server of ours")
        self.schedule, self.proxy = schedule, FaultProxy(server.port, schedule).__enter__()
        prefix, credentials = f"test-{secrets.token_hex(8)}", credentials_in(server.environment)
        address = s3_address(server.url(prefix, self.proxy.endpoint))
        self.store = S3Store(address, credentials, retries=AT_ONCE, patience=QUICK, part_bytes=PART)
        self.clean = S3Store(s3_address(server.url(prefix)), credentials)


@pytest.fixture
def bad(server: S3Server) -> Iterator[Callable[..., Bad]]:
    made: list[Bad] = []

    def make(seed: int = 0, **schedule: object) -> Bad:
        made.append(Bad(server, Schedule(seed, **schedule)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.proxy.__exit__()


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]


@pytest.mark.parametrize("seed", SEEDS)
def test_under_faults_every_object_is_written_whole_and_read_right(bad: Callable[..., Bad], seed: int, tmp_path: Path):
    rig, draw = bad(seed), random.Random(seed)
    contents: dict[str, bytes] = {}
    for i in range(12):
        size = draw.choice([0, 10, 5_000, (1 << 20) + 1, 2 * PART + 17]) if i else 2 * PART + 17
        contents[f"o/{i}"] = draw.randbytes(size)
        if i % 2:
            rig.store.put_bytes(f"o/{i}", contents[f"o/{i}"])
        else:
            (tmp_path / "file").write_bytes(contents[f"o/{i}"])
            rig.store.put_file(f"o/{i}", tmp_path / "file")

    assert {s.key: s.size for s in rig.store.list("o/")} == {key: len(data) for key, data in contents.items()}
    assert {key: rig.clean.get_bytes(key) for key in contents} == contents
    assert {key: rig.store.get_bytes(key) for key in contents if len(contents[key]) < 1 << 20} == {
        key: data for key, data in contents.items() if len(data) < 1 << 20
    }
    for key in contents:
        rig.store.delete(key)
    assert list(rig.clean.list("")) == []
    assert sum(count for kind, count in rig.schedule.done.items() if kind != "passed") > 10


@pytest.mark.parametrize("kind", BROKEN)
def test_each_fault_alone_is_outlived(bad: Callable[..., Bad], kind: str, tmp_path: Path):
    rig = bad(1, kinds=[kind], share=0.9 if kind != "silence" else 0.4, limit=1)
    (tmp_path / "large").write_bytes(os.urandom(PART + 3))

    rig.store.put_bytes("a/small", b"0123456789" * 100)
    rig.store.put_file("a/large", tmp_path / "large")

    assert rig.store.get_bytes("a/small") == b"0123456789" * 100
    assert rig.clean.get_bytes("a/large") == (tmp_path / "large").read_bytes()
    assert [s.key for s in rig.store.list("a/")] == ["a/large", "a/small"]
    assert rig.schedule.done[kind] > 0


def test_deletions_of_one_object_that_meet_are_no_failure(bad: Callable[..., Bad]):
    """A second try meets the first one where that was cut off on its way back."""
    store = bad(0, share=0.0).clean
    with ThreadPoolExecutor(8) as pool:
        for i in range(40):
            store.put_bytes(f"o/{i}", b"data")
            list(pool.map(store.delete, [f"o/{i}"] * 8))

    assert list(store.list("")) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_committed_unit_survives_faults_or_the_reader_says_what_is_damaged(
    bad: Callable[..., Bad], seed: int, tmp_path: Path
):
    rig, data = bad(seed), random.Random(seed).randbytes(2 * PART)
    writer = UnitWriter(rig.store, tenant="t", job_id="j", stage="extract", unit=(0, 0, 1), unit_key="k", fence=1)
    (tmp_path / "shard").write_bytes(data)
    writer.add_file("shard", tmp_path / "shard")
    ref = writer.commit({})

    read = 0
    for attempt in range(6):
        try:
            path = fetch_file(rig.store, read_manifest(rig.store, ref).file("shard"), tmp_path / f"scratch-{attempt}")
        except ObjectDamaged:
            continue
        assert digest_bytes(path.read_bytes()) == digest_bytes(data)
        read += 1
    rig.schedule.on = False
    assert fetch_file(rig.store, read_manifest(rig.store, ref).file("shard"), tmp_path / "last").read_bytes() == data
    assert read > 0


def test_a_store_that_stays_away_is_a_typed_failure_that_may_pass(bad: Callable[..., Bad]):
    rig = bad(0, kinds=["slow_down"], share=1.0, limit=1000)

    for act in (
        lambda: rig.store.put_bytes("a", b"x"),
        lambda: rig.store.get_bytes("a"),
        lambda: list(rig.store.list("")),
    ):
        with pytest.raises(StoreUnavailable, match="503") as caught:
            act()
        assert caught.value.retryable


def test_a_full_store_is_told_at_once_and_typed(bad: Callable[..., Bad], tmp_path: Path):
    rig = bad(0, kinds=["full"], share=1.0, limit=1000)
    (tmp_path / "large").write_bytes(bytes(PART + 1))

    with pytest.raises(StoreFull, match="no room"):
        rig.store.put_bytes("a", b"x")
    with pytest.raises(StoreFull, match="no room"):
        rig.store.put_file("a", tmp_path / "large")


def test_two_runs_of_one_seed_break_the_same_requests():
    runs = []
    for _ in range(2):
        schedule = Schedule(7)
        runs.append([schedule.next(f"GET /o{i % 3}") for i in range(200)])

    assert runs[0] == runs[1]
    assert set(runs[0]) >= {None, "reset", "silence"}


def test_no_request_is_broken_more_often_in_a_row_than_the_limit():
    schedule = Schedule(3, share=0.95, limit=2)
    told = [schedule.next("GET /o") is not None for _ in range(500)]

    assert not any(all(told[i : i + 3]) for i in range(len(told)))
