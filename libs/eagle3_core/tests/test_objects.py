"""Objects are whole or absent, keys cannot leave the store, and manifests catch every changed byte."""

import json
from pathlib import Path

import pytest
from hostile import damaged, odd_documents, odd_values
from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.digests import digest_bytes
from eagle3_core.jobs.wire import ManifestRef
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import UnitWriter, fetch_file, read_manifest
from eagle3_core.objects.protocol import BadKey, ObjectDamaged, ObjectMissing, checked_key


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def written(store: LocalStore, **summary: int) -> ManifestRef:
    writer = UnitWriter(store, tenant="t", job_id="job_1", stage="vocab", unit=(0, 0, 1), unit_key="k", fence=3)
    writer.add_bytes("vocab.safetensors", b"0123456789")
    return writer.commit(dict(summary))


def test_ranges_and_lists_and_stats(store: LocalStore):
    store.put_bytes("a/b", b"0123456789")
    store.put_bytes("a/c", b"x")

    assert store.get_bytes("a/b", 2, 3) == b"234"
    assert [s.key for s in store.list("a/")] == ["a/b", "a/c"]
    assert store.stat("a/b").size == 10


def test_a_missing_object_is_a_typed_error(store: LocalStore):
    with pytest.raises(ObjectMissing):
        store.get_bytes("no/such")


def test_a_write_that_dies_half_way_leaves_nothing_visible(store: LocalStore, tmp_path: Path):
    class Dies(Exception):
        pass

    def fill(file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise Dies

    with pytest.raises(Dies):
        store._write("a/b", fill)

    assert list(store.list("")) == []
    assert not any(p.is_file() for p in (tmp_path / "store").rglob("*"))


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/.hidden", "a\x00b", "a b", "a\nb", "é", "x" * 2000]
)
def test_keys_cannot_leave_the_store(key: str):
    with pytest.raises(BadKey):
        checked_key(key)


@given(st.text(max_size=40))
def test_a_key_that_passes_stays_inside(key: str):
    try:
        checked_key(key)
    except BadKey:
        return
    assert ".." not in key.split("/")
    assert not key.startswith("/")


def test_a_manifest_round_trips_with_its_files(store: LocalStore, tmp_path: Path):
    manifest = read_manifest(store, written(store, draft_vocab_size=7))

    assert manifest.summary == {"draft_vocab_size": 7}
    assert fetch_file(store, manifest.file("vocab.safetensors"), tmp_path).read_bytes() == b"0123456789"


def test_content_is_the_same_for_the_same_result_and_no_other(store: LocalStore):
    assert written(store, n=1).content == written(store, n=1).content
    assert written(store, n=1).content != written(store, n=2).content


@pytest.mark.parametrize("damage", [b"012345678", b"0123456780", b""])
def test_a_damaged_file_is_named(store: LocalStore, tmp_path: Path, damage: bytes):
    entry = read_manifest(store, written(store)).file("vocab.safetensors")
    (store.root / entry.key).write_bytes(damage)

    with pytest.raises(ObjectDamaged, match=r"vocab\.safetensors"):
        fetch_file(store, entry, tmp_path)


def test_a_damaged_manifest_is_refused(store: LocalStore):
    ref = written(store)
    data = store.get_bytes(ref.key)
    (store.root / ref.key).write_bytes(data.replace(b'"fence": 3', b'"fence": 4'))

    with pytest.raises(ObjectDamaged):
        read_manifest(store, ref)


def vouched(store: LocalStore, data: bytes) -> ManifestRef:
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
def test_a_file_that_a_manifest_places_outside_the_store_is_refused(store: LocalStore, field: str, value: object):
    document = json.loads(store.get_bytes(written(store).key))
    document["files"][0][field] = value

    with pytest.raises(ObjectDamaged, match=f"files.0.{field}"):
        read_manifest(store, vouched(store, json.dumps(document).encode()))


@pytest.mark.parametrize("change", [{"schema_version": 2}, {"unit": [0, -1, 1]}, {"created_at": 1e999}])
def test_a_manifest_of_another_version_or_without_sense_is_refused(store: LocalStore, change: dict[str, object]):
    document = json.loads(store.get_bytes(written(store).key))

    with pytest.raises(ObjectDamaged, match=next(iter(change))):
        read_manifest(store, vouched(store, json.dumps({**document, **change}).encode()))


def test_a_key_that_names_a_folder_or_lies_below_a_file_is_a_missing_object(store: LocalStore):
    store.put_bytes("a/b", b"x")

    for key in ("a", "a/b/c"):
        with pytest.raises(ObjectMissing):
            store.get_bytes(key)
