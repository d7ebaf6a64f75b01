"""Looking into shards without torch: a picture of what is whole, and a typed error for everything else."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hostile import damaged, odd_documents, odd_values, tensor_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inspected_files import CONTRACT, NAN_BF16, ONE_BF16, H, write_bf16, write_shard

from aerie_cli.inspect.shard import runs
from eagle3_core import strict_json
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import UnitWriter
from eagle3_core.testing import tiny_verifier


def committed(root: Path, shard: Path, contract=CONTRACT, **counts) -> Path:
    """`shard` in a store with a manifest; the manifest's path."""
    store = LocalStore(root / "store")
    writer = UnitWriter(store, tenant="t", job_id="job_1", stage="extract", unit=(0, 0, 2), unit_key="k", fence=1)
    writer.add_file(
        "shard-00000.safetensors",
        shard,
        **{"samples": 2, "tokens": 8, "supervised_tokens": 2, "final_states": 3, **counts},
    )
    return store.root / writer.commit({}, contract=contract).key


def refused(aerie, *arguments) -> tuple[int, dict]:
    """The exit status and the problem document of a command that must fail."""
    asked = aerie("inspect", "shard", *map(str, arguments), "--json")
    assert asked.exit_code in (1, 2)
    return asked.exit_code, strict_json.loads(asked.stdout)


def test_a_shard_shows_its_counts_and_its_supervised_spans_in_words(offline, tmp_path):
    shard = write_shard(tmp_path / "shard-00000.safetensors")
    verifier = tiny_verifier(tmp_path / "verifier")

    shown = offline.json("inspect", "shard", str(shard), "--verifier", str(verifier))

    (fact,) = shown["shards"]
    assert (fact["samples"], fact["tokens"], fact["supervised_tokens"], fact["final_states"]) == (2, 8, 2, 3)
    assert [(span["supervised"], span["tokens"]) for span in fact["first"][0]["spans"]] == [(False, 3), (True, 2)]
    assert fact["first"][0]["spans"][1]["text"].endswith("<|im_end|>")
    assert fact["first"][1]["task"] == "qa"
    assert shown["not_finite"] == 0


def test_a_manifest_shows_its_shards_and_the_contract(offline, tmp_path):
    manifest = committed(tmp_path, write_shard(tmp_path / "x.safetensors", input_ids=np.arange(8, dtype=np.int32)))

    shown = offline.json("inspect", "shard", str(manifest))

    assert [fact["tokens"] for fact in shown["shards"]] == [8]
    assert shown["contract"]["aux_layers"] == [2, 4, 5]
    assert "aux_layers" in offline("inspect", "shard", str(manifest)).stdout


def test_a_nan_state_is_found_and_is_exit_status_1(offline, tmp_path):
    shard = write_shard(tmp_path / "shard-00000.safetensors", states=NAN_BF16)

    asked = offline("inspect", "shard", str(shard), "--json")

    assert asked.exit_code == 1
    assert json.loads(asked.stdout)["not_finite"] == 1


def test_without_a_tokenizer_tokens_are_numbers_and_that_is_said(offline, tmp_path):
    shown = offline.json("inspect", "shard", str(write_shard(tmp_path / "shard-00000.safetensors")))

    assert shown["shards"][0]["first"][0]["spans"][1]["text"] == "22 2"
    assert "give --verifier" in shown["warning"]


def test_a_tokenizer_that_does_not_load_leaves_numbers(offline, tmp_path):
    verifier = tiny_verifier(tmp_path / "verifier")
    (verifier / "tokenizer.json").write_text('{"model": {"type": "nonsense"}, "added_tokens": []}')

    shown = offline.json("inspect", "shard", str(write_shard(tmp_path / "s.safetensors")), "--verifier", str(verifier))

    assert "shown as numbers" in shown["warning"]


def test_a_truncated_shard_names_its_file(offline, tmp_path):
    shard = write_shard(tmp_path / "shard-00000.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])

    status, problem = refused(offline, shard)

    assert (status, problem["code"]) == (2, "inspect.tensors")
    assert str(shard) in problem["detail"]
    assert "truncated" in problem["detail"]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'{"messages": []}\n{"messages": []}\n', "JSON lines, as data sets are"),
        (b'{\n "name": "fox"\n}\n', "a JSON document"),
        (b'{"name": "fox"}', "a JSON document"),
        (b"name: fox\nverifier: {}\n", "text"),
        (b"PAR1\x15\x04", "a Parquet file"),
        (b"\x1f\x8b\x08\x00", "a gzip file"),
    ],
)
def test_a_file_of_another_kind_is_told_by_what_it_looks_like_and_where_shards_are(offline, tmp_path, content, kind):
    (place := tmp_path / "x.jsonl").write_bytes(content)

    status, problem = refused(offline, place)

    assert (status, problem["code"]) == (2, "inspect.tensors")
    assert problem["detail"] == f"{place} is no safetensors file: it looks like {kind}"
    assert "objects/TENANT/extract/JOB" in problem["remedy"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sample_offsets": np.array([0, 5, 9])}, "sample_offsets do not rise from 0 to 8"),
        ({"sample_offsets": np.array([0, 9, 8])}, "sample_offsets do not rise"),
        ({"sample_offsets": np.array([-3, 5, 8])}, "sample_offsets do not rise"),
        ({"sample_offsets": np.array([0, 1 << 62, 8])}, "sample_offsets do not rise"),
        ({"sample_offsets": np.array([0, 8])}, "1 samples, 2 ids, 2 tasks"),
        ({"sample_offsets": np.zeros(0, np.int64)}, "sample_offsets do not rise"),
        ({"input_ids": np.full(8, -5, np.int32)}, "it holds token -5"),
        ({"input_ids": np.zeros((2, 4), np.int32)}, "input_ids is I32 [2, 4]"),
        ({"loss_mask": np.full(8, 7, np.uint8)}, "other than 0 and 1"),
        ({"loss_mask": np.zeros(7, np.uint8)}, "8 tokens, 7 mask values"),
        ({"final_index": np.array([2, 2, 4], np.int32)}, "final_index does not rise"),
        ({"final_index": np.array([2, 3, 8], np.int32)}, "final_index does not rise"),
        ({"final_index": np.array([2, 3], np.int32)}, "do not fit 8 tokens, 2 of them"),
        ({"aux": np.full((8, 3), ONE_BF16, np.uint16)}, "do not fit"),
        ({"aux": np.ones((8, 3 * H), np.float32)}, "codec raw stores BF16"),
        ({"header": {"schema_version": 2}}, "schema version 2"),
        ({"header": {"ids": ["a", 3]}}, "ids.1"),
    ],
)
def test_a_shard_that_contradicts_itself_is_refused_by_name(offline, tmp_path, changes, says):
    shard = write_shard(tmp_path / "s.safetensors", **changes)

    status, problem = refused(offline, shard)

    assert (status, problem["code"]) == (1, "shards.damaged")
    assert str(shard) in problem["detail"]
    assert says in problem["detail"]


def test_a_codec_that_is_not_known_is_not_guessed_at(offline, tmp_path):
    shard = write_shard(tmp_path / "s.safetensors", header={"codec": "later"})

    assert refused(offline, shard)[1]["code"] == "shards.codec"


@pytest.mark.parametrize("counts", [{"samples": 3}, {"tokens": 9}, {"supervised_tokens": 0}, {"final_states": 4}])
def test_a_manifest_that_counts_otherwise_is_believed_no_more_than_the_file(offline, tmp_path, counts):
    ids = np.arange(8, dtype=np.int32)
    manifest = committed(tmp_path, write_shard(tmp_path / "x.safetensors", input_ids=ids), **counts)

    status, problem = refused(offline, manifest)

    assert (status, problem["code"]) == (1, "shards.damaged")
    assert "in the manifest" in problem["detail"]


def test_a_shard_is_held_against_its_contract(offline, tmp_path):
    ids = np.arange(8, dtype=np.int32)
    shard = write_shard(tmp_path / "x.safetensors", input_ids=ids)

    for change, says in (({"vocab_size": 5}, "tokens go from 0 to 4"), ({"hidden_size": 8}, "of hidden size 8")):
        manifest = committed(tmp_path / str(change), shard, {**CONTRACT, **change})
        assert says in refused(offline, manifest)[1]["detail"]


def test_a_manifest_beside_a_shard_vouches_for_its_bytes(offline, tmp_path):
    manifest = committed(tmp_path, write_shard(tmp_path / "x.safetensors", input_ids=np.arange(8, dtype=np.int32)))
    (shard,) = manifest.parent.glob("*shard-00000.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    for named in (shard, manifest):
        status, problem = refused(offline, named)
        assert (status, problem["code"]) == (1, "object.damaged")
        assert "hashes to" in problem["detail"]


def test_a_manifest_of_another_stage_or_none_beside_a_shard_says_nothing_of_it(offline, tmp_path):
    (tmp_path / "a-manifest.json").write_bytes(b"\xff")
    store = LocalStore(tmp_path)
    UnitWriter(store, tenant="t", job_id="j", stage="train", unit=(0, 0, 1), unit_key="k", fence=1).commit({})

    assert offline("inspect", "shard", str(write_shard(tmp_path / "s.safetensors"))).exit_code == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, bytes, bytes]:
    """A place for a shard, the bytes of a whole one, and those of a manifest."""
    folder = tmp_path_factory.mktemp("whole")
    place = write_shard(folder / "s.safetensors")
    manifest = committed(folder, write_shard(folder / "x.safetensors", input_ids=np.arange(8, dtype=np.int32)))
    return place, place.read_bytes(), manifest.read_bytes()


NAMES = ("input_ids", "loss_mask", "sample_offsets", "final_index", "aux", "final")
CLI = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@CLI
@given(data=st.data())
def test_any_bytes_are_a_picture_or_a_typed_error(offline, whole, data):
    place, content, _ = whole
    place.write_bytes(data.draw(damaged(content) | tensor_files(NAMES) | odd_documents | st.binary(max_size=30)))

    told_or_refused(offline("inspect", "shard", str(place), "--json"))


def arrays(dtype, low, high):
    near = st.integers(0, 9)
    return st.lists(near | st.integers(low, high), max_size=10).map(lambda values: np.array(values, dtype))


@CLI
@given(
    offsets=arrays(np.int64, -(1 << 63), (1 << 63) - 1) | st.just(np.array([0, 5, 8])),
    ids=arrays(np.int32, -(1 << 31), (1 << 31) - 1) | st.just(np.arange(8, dtype=np.int32)),
    mask=arrays(np.uint8, 0, 255) | st.just(np.array([0, 0, 0, 1, 1, 0, 0, 0], np.uint8)),
    final=arrays(np.int32, -(1 << 31), (1 << 31) - 1) | st.just(np.array([2, 3, 4], np.int32)),
)
def test_any_numbers_in_a_well_formed_file_are_a_picture_or_a_typed_error(offline, whole, offsets, ids, mask, final):
    shard = write_shard(whole[0], sample_offsets=offsets, input_ids=ids, loss_mask=mask, final_index=final)

    told_or_refused(offline("inspect", "shard", str(shard), "--json"))


@CLI
@given(data=st.data())
def test_any_bytes_that_call_themselves_a_manifest_are_a_picture_or_a_typed_error(offline, whole, data):
    place, _, content = whole
    manifest = place.with_name("m.json")
    document = json.loads(content)
    field = st.sampled_from(sorted(document))
    changed = st.tuples(field, odd_values).map(lambda pair: json.dumps({**document, pair[0]: pair[1]}).encode())
    manifest.write_bytes(data.draw(damaged(content) | changed | odd_documents))

    told_or_refused(offline("inspect", "shard", str(manifest), "--json"))


def told_or_refused(asked) -> None:
    """Exit status 0 and a picture, 1 and a picture with its fault, or a problem with code and remedy; always JSON."""
    said = strict_json.loads(asked.stdout)
    if "shards" in said:
        assert asked.exit_code == (1 if said["not_finite"] else 0)
    else:
        assert asked.exit_code in (1, 2)
        assert said["remedy"]
        assert said["code"] != "internal"


def test_names_that_carry_control_characters_do_not_reach_the_terminal(offline, tmp_path):
    names = {"ids": ["\x1b[2Jgone", "b\u202e"], "tasks": ["a\rb", "[bold]c"]}

    told = offline("inspect", "shard", str(write_shard(tmp_path / "s.safetensors", header=names))).stdout

    assert "\x1b" not in told
    assert "\u202e" not in told
    assert r"\x1b[2Jgone (a\rb)" in told
    assert r"b\u202e ([bold]c)" in told


@pytest.mark.parametrize("name", ["pipe", "folder", "nowhere", "x" * 300, "loop"])
def test_what_is_no_file_is_refused_at_once(offline, tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")

    for place in (tmp_path / name, tmp_path / f"{name}.json"):
        if name == "pipe":
            os.mkfifo(tmp_path / "pipe.json") if not (tmp_path / "pipe.json").exists() else None
        asked = offline("inspect", "shard", str(place))
        assert asked.exit_code in (1, 2)
        assert "remedy" in asked.stderr


def test_runs_follow_the_mask():
    found = list(runs(np.array([5, 6, 7, 8]), np.array([1, 0, 0, 1])))

    assert [(on, ids.tolist()) for on, ids in found] == [(True, [5]), (False, [6, 7]), (True, [8])]


def test_a_shard_without_samples_is_shown(offline, tmp_path):
    empty = {
        "input_ids": np.zeros(0, np.int32), "loss_mask": np.zeros(0, np.uint8), "sample_offsets": np.zeros(1, np.int64),
        "final_index": np.zeros(0, np.int32), "aux": np.zeros((0, 6), np.uint16), "final": np.zeros((0, 2), np.uint16),
    }  # fmt: skip
    header = {"schema_version": 1, "codec": "raw", "ids": [], "tasks": []}
    shard = write_bf16(tmp_path / "s.safetensors", empty, {"shard": json.dumps(header)})

    assert offline.json("inspect", "shard", str(shard))["shards"][0]["samples"] == 0
