"""Objects are whole or absent, keys cannot leave the store, and manifests catch every changed byte: in every store."""

import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hostile import damaged, odd_documents, odd_values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3_core.digests import digest_bytes
from eagle3_core.jobs.wire import ManifestRef
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.location import UnknownStore, store_at
from eagle3_core.objects.manifest import UnitWriter, fetch_file, read_manifest
from eagle3_core.objects.protocol import BadKey, ObjectDamaged, ObjectMissing, ObjectStore, StoreRefused, checked_key

SEGMENT = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,12}", fullmatch=True)
EXAMPLES = itertools.count()
KEYS = st.lists(SEGMENT, min_size=1, max_size=4).map("/".join)


def written(store: ObjectStore, **summary: int) -> ManifestRef:
    writer = UnitWriter(store, tenant="t", job_id="job_1", stage="vocab", unit=(0, 0, 1), unit_key="k", fence=3)
    writer.add_bytes("vocab.safetensors", b"0123456789")
    return writer.commit(dict(summary))


def test_ranges_and_lists_and_stats(store: ObjectStore):
    store.put_bytes("a/b", b"0123456789")
    store.put_bytes("a/c", b"x")

    assert store.get_bytes("a/b", 2, 3) == b"234"
    assert [s.key for s in store.list("a/")] == ["a/b", "a/c"]
    assert store.stat("a/b").size == 10


@pytest.mark.parametrize("size", [0, 1, 10])
def test_a_range_is_what_a_slice_of_the_object_is(store: ObjectStore, size: int):
    content = bytes(range(size))
    store.put_bytes("o", content)

    for start in (0, 1, size, size + 3):
        assert store.get_bytes("o", start) == content[start:]
        for length in (0, 1, 4, size, size + 9):
            assert store.get_bytes("o", start, length) == content[start : start + length]


def test_a_missing_object_is_a_typed_error(store: ObjectStore, tmp_path: Path):
    for look in (
        store.get_bytes,
        store.stat,
        lambda key: store.get_bytes(key, 1, 0),
        lambda k: store.fetch(k, tmp_path),
    ):
        with pytest.raises(ObjectMissing, match="no/such"):
            look("no/such")


def test_time_of_an_object_is_when_it_was_written(store: ObjectStore):
    before = time.time()
    store.put_bytes("a", b"x")

    assert before - 2 <= store.stat("a").modified <= time.time() + 2


def test_what_was_deleted_is_gone_and_may_be_deleted_again(store: ObjectStore):
    store.put_bytes("a/b", b"x")
    store.put_bytes("a/b.c", b"y")

    store.delete("a/b")
    store.delete("a/b")

    assert [s.key for s in store.list("")] == ["a/b.c"]


def test_files_of_every_size_come_back_as_they_went(store: ObjectStore, tmp_path: Path):
    for size in (0, 1, 70_000, (1 << 20) + 1, (33 << 20) + 7):
        file = tmp_path / "file"
        file.write_bytes(os.urandom(size))
        store.put_file(f"files/{size}", file)

        copy = store.fetch(f"files/{size}", tmp_path / "scratch")

        assert copy.read_bytes() == file.read_bytes()
        assert store.stat(f"files/{size}").size == size


def test_large_bytes_come_back_as_they_went(store: ObjectStore):
    data = os.urandom((2 << 20) + 3)
    store.put_bytes("large", data)

    assert store.get_bytes("large") == data
    assert store.get_bytes("large", (1 << 20) - 2, 5) == data[(1 << 20) - 2 : (1 << 20) + 3]


def test_a_store_passes_its_own_probe_and_is_left_empty(store: ObjectStore):
    store.probe()

    assert list(store.list("")) == []


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.dictionaries(KEYS, st.binary(max_size=40), max_size=6), prefix=SEGMENT)
def test_any_keys_hold_their_own_bytes_and_list_in_order(store: ObjectStore, contents: dict[str, bytes], prefix: str):
    below = {key for key in contents if any(other.startswith(key + "/") for other in contents)}
    mine = f"example-{next(EXAMPLES)}/"  # what an earlier example left as a folder can be no object now
    contents = {
        mine + key: data for key, data in contents.items() if key not in below
    }  # a folder is no object on a disk
    for key, data in contents.items():
        store.put_bytes(key, data)

    assert [s.key for s in store.list(mine)] == sorted(contents)
    assert {key: store.get_bytes(key) for key in contents} == contents
    assert [s.key for s in store.list(mine + prefix)] == sorted(
        key for key in contents if key.startswith(mine + prefix)
    )


def test_a_long_list_is_whole(store: ObjectStore):
    keys = [f"l/{i % 7}/{i:04d}" for i in range(1203)]
    for key in keys:
        store.put_bytes(key, b"")

    assert [s.key for s in store.list("l/")] == sorted(keys)


def test_a_write_that_dies_half_way_leaves_nothing_visible(tmp_path: Path):
    class Dies(Exception):
        pass

    def fill(file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise Dies

    store = LocalStore(tmp_path / "store")
    with pytest.raises(Dies):
        store._write("a/b", fill)

    assert list(store.list("")) == []
    assert not any(p.is_file() for p in (tmp_path / "store").rglob("*"))


def test_what_a_killed_writer_left_is_removed_once_it_is_old(tmp_path: Path):
    store = LocalStore(tmp_path / "store")
    store.put_bytes("a/b", b"x")
    half = tmp_path / "store/a/.tmp-0"
    half.write_bytes(b"ha")

    assert store.abort_stale_uploads(3600) == 0
    assert store.abort_stale_uploads(-1) == 1
    assert [s.key for s in store.list("")] == ["a/b"]
    assert not half.exists()


@pytest.mark.parametrize(
    "key",
    ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/.hidden", "a\x00b", "a b", "a\nb", "a\n", "é", "x" * 2000, "a/"],
)
def test_keys_cannot_leave_the_store(store: ObjectStore, tmp_path: Path, key: str):
    with pytest.raises(BadKey):
        checked_key(key)
    for act in (
        lambda: store.get_bytes(key), lambda: store.put_bytes(key, b"x"), lambda: store.delete(key),
        lambda: store.stat(key), lambda: store.fetch(key, tmp_path), lambda: store.put_file(key, Path(__file__)),
    ):  # fmt: skip
        with pytest.raises(BadKey):
            act()


@given(st.text(max_size=40))
def test_a_key_that_passes_stays_inside(key: str):
    try:
        checked_key(key)
    except BadKey:
        return
    assert ".." not in key.split("/")
    assert not key.startswith("/")
    assert key.isprintable()


def test_a_manifest_round_trips_with_its_files(store: ObjectStore, tmp_path: Path):
    manifest = read_manifest(store, written(store, draft_vocab_size=7))

    assert manifest.summary == {"draft_vocab_size": 7}
    assert fetch_file(store, manifest.file("vocab.safetensors"), tmp_path / "scratch").read_bytes() == b"0123456789"


def test_content_is_the_same_for_the_same_result_and_no_other(tmp_path: Path):
    store = LocalStore(tmp_path)
    assert written(store, n=1).content == written(store, n=1).content
    assert written(store, n=1).content != written(store, n=2).content


def test_no_two_writers_ever_share_a_key(tmp_path: Path):
    store = LocalStore(tmp_path)
    refs = [written(store, n=1) for _ in range(3)]

    keys = [entry.key for ref in refs for entry in read_manifest(store, ref).files]

    assert len({*keys, *(ref.key for ref in refs)}) == 6


@pytest.mark.parametrize("damage", [b"012345678", b"0123456780", b""])
def test_a_damaged_file_is_named(store: ObjectStore, tmp_path: Path, damage: bytes):
    entry = read_manifest(store, written(store)).file("vocab.safetensors")
    store.put_bytes(entry.key, damage)

    with pytest.raises(ObjectDamaged, match=r"vocab\.safetensors"):
        fetch_file(store, entry, tmp_path / "scratch")


def test_a_damaged_manifest_is_refused(store: ObjectStore):
    ref = written(store)
    data = store.get_bytes(ref.key)
    store.put_bytes(ref.key, data.replace(b'"fence": 3', b'"fence": 4'))

    with pytest.raises(ObjectDamaged):
        read_manifest(store, ref)


def vouched(store: ObjectStore, data: bytes) -> ManifestRef:
    """A commit that says `data` is its manifest."""
    store.put_bytes("m", data)
    return ManifestRef(key="m", blake3=digest_bytes(data), content="c")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalStore, bytes]:
    """A store and the bytes of a whole manifest."""
    store = LocalStore(tmp_path_factory.mktemp("kept"))
    return store, store.get_bytes(written(store).key)


@given(data=st.data())
def test_any_bytes_that_a_commit_vouches_for_are_refused_by_name(kept: tuple[LocalStore, bytes], data: st.DataObject):
    store, whole = kept
    field = st.sampled_from(sorted(json.loads(whole)))
    changed = st.tuples(field, odd_values).map(
        lambda pair: json.dumps({**json.loads(whole), pair[0]: pair[1]}).encode()
    )

    with pytest.raises(ObjectDamaged, match=r"m is no manifest|m holds content"):
        read_manifest(store, vouched(store, data.draw(damaged(whole) | changed | odd_documents)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", "/etc/passwd"), ("key", "../../secret"), ("key", "a\0b"), ("key", "x" * 2000), ("name", "../up"),
        ("name", ""), ("name", "/abs"), ("size", -1), ("blake3", "../x"), ("blake3", ""),
    ],
)  # fmt: skip
def test_a_file_that_a_manifest_places_outside_the_store_is_refused(store: ObjectStore, field: str, value: object):
    document = json.loads(store.get_bytes(written(store).key))
    document["files"][0][field] = value

    with pytest.raises(ObjectDamaged, match=f"files.0.{field}"):
        read_manifest(store, vouched(store, json.dumps(document).encode()))


@pytest.mark.parametrize("change", [{"schema_version": 2}, {"unit": [0, -1, 1]}, {"created_at": 1e999}])
def test_a_manifest_of_another_version_or_without_sense_is_refused(store: ObjectStore, change: dict[str, object]):
    document = json.loads(store.get_bytes(written(store).key))

    with pytest.raises(ObjectDamaged, match=next(iter(change))):
        read_manifest(store, vouched(store, json.dumps({**document, **change}).encode()))


def test_a_damaged_copy_is_thrown_away_and_fetched_again(store: ObjectStore, tmp_path: Path):
    entry = read_manifest(store, written(store)).file("vocab.safetensors")
    copy = store.fetch(entry.key, tmp_path / "scratch")
    if copy.parent != tmp_path / "scratch":
        pytest.skip("a local store serves the object itself")
    copy.write_bytes(b"012345678?")

    assert fetch_file(store, entry, tmp_path / "scratch").read_bytes() == b"0123456789"


def test_a_local_object_is_never_thrown_away_by_a_reader(tmp_path: Path):
    store = LocalStore(tmp_path)
    entry = read_manifest(store, written(store)).file("vocab.safetensors")
    (tmp_path / entry.key).write_bytes(b"damaged")

    with pytest.raises(ObjectDamaged):
        fetch_file(store, entry, tmp_path)

    assert (tmp_path / entry.key).read_bytes() == b"damaged"


def test_a_key_that_names_a_folder_or_lies_below_a_file_is_a_missing_object(store: ObjectStore):
    store.put_bytes("a/b", b"x")

    for key in ("a", "a/b/c"):
        with pytest.raises(ObjectMissing):
            store.get_bytes(key)


@pytest.mark.parametrize("url", ["", "ftp://x/y", "file://elsewhere/x", "file:relative", "/folder", "gs://b"])
def test_a_url_without_a_store_is_refused(url: str):
    with pytest.raises(UnknownStore):
        store_at(url)


@contextmanager
def shut(folder: Path) -> Iterator[None]:
    """Nobody gets into `folder`, this process neither: root, whom no mode keeps out, becomes somebody else meanwhile."""
    user = os.geteuid()
    folder.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o700)


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.put_bytes("new/object", b"x"),
        lambda store: store.put_bytes("object", b"x"),
        lambda store: store.get_bytes("object"),
        lambda store: store.stat("object"),
        lambda store: store.fetch("object", store.root),
        lambda store: store.delete("object"),
    ],
    ids=["put in a new folder", "put", "get", "stat", "fetch", "delete"],
)
def test_a_folder_that_keeps_this_process_out_is_said_to_be_just_that_with_what_to_do(tmp_path, act):
    store = LocalStore(tmp_path / "store")
    store.put_bytes("object", b"0123456789")

    with shut(store.root), pytest.raises(StoreRefused, match="Permission denied") as caught:
        act(store)

    assert str(store.root) in caught.value.detail
    assert str(store.root) in (caught.value.remedy or "")
    assert store.get_bytes("object") == b"0123456789"
    assert [found.key for found in store.list("")] == ["object"]
