"""Looking into shards and drafters without torch: files are built here from plain numpy arrays."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from aerie_cli.inspect.drafter import vocabulary_faults
from aerie_cli.inspect.shard import runs
from aerie_cli.inspect.tensors import NotTensors, Stored, read_tensors
from eagle3_core.testing import tiny_verifier

NAN_BF16, ONE_BF16 = 0x7FC0, 0x3F80


def write_bf16(path, tensors, bf16, metadata):
    """A safetensors file in which the uint16 arrays named in `bf16` are declared to be bfloat16."""
    header, data, at = {"__metadata__": metadata}, b"", 0
    names = {"uint8": "U8", "int32": "I32", "int64": "I64", "uint16": "BF16", "float32": "F32"}
    for name, array in tensors.items():
        raw = array.tobytes()
        assert (array.dtype == np.uint16) == (name in bf16)
        header[name] = {
            "dtype": names[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(raw)],
        }
        data, at = data + raw, at + len(raw)
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)
    return path


def write_shard(path, *, states=ONE_BF16):
    """Two samples: five tokens of which the last two are supervised, and three of which none is."""
    aux = np.full((8, 6), ONE_BF16, np.uint16)
    aux[3, 2] = states
    tensors = {
        "input_ids": np.array([1, 20, 21, 22, 2, 1, 30, 2], np.int32),
        "loss_mask": np.array([0, 0, 0, 1, 1, 0, 0, 0], np.uint8),
        "sample_offsets": np.array([0, 5, 8], np.int64),
        "aux": aux,
        "final": np.full((3, 2), ONE_BF16, np.uint16),
        "final_index": np.array([2, 3, 4], np.int32),
    }
    header = {"schema_version": 1, "codec": "raw", "ids": ["a", "b"], "tasks": ["code", "qa"]}
    return write_bf16(path, tensors, ("aux", "final"), {"shard": json.dumps(header)})


def test_a_shard_shows_its_counts_and_its_supervised_spans_in_words(aerie, tmp_path):
    shard = write_shard(tmp_path / "shard-00000.safetensors")
    verifier = tiny_verifier(tmp_path / "verifier")

    shown = aerie.json("inspect", "shard", str(shard), "--verifier", str(verifier))

    (fact,) = shown["shards"]
    assert (fact["samples"], fact["tokens"], fact["supervised_tokens"], fact["final_states"]) == (2, 8, 2, 3)
    assert [(span["supervised"], span["tokens"]) for span in fact["first"][0]["spans"]] == [(False, 3), (True, 2)]
    assert fact["first"][0]["spans"][1]["text"].endswith("<|im_end|>")
    assert fact["first"][1]["task"] == "qa"
    assert shown["not_finite"] == 0


def test_a_nan_state_is_found_and_is_exit_status_1(aerie, tmp_path):
    shard = write_shard(tmp_path / "shard-00000.safetensors", states=NAN_BF16)

    asked = aerie("inspect", "shard", str(shard), "--json")

    assert asked.exit_code == 1
    assert json.loads(asked.stdout)["not_finite"] == 1


def test_without_a_tokenizer_tokens_are_numbers_and_that_is_said(aerie, tmp_path):
    shown = aerie.json("inspect", "shard", str(write_shard(tmp_path / "shard-00000.safetensors")))

    assert shown["shards"][0]["first"][0]["spans"][1]["text"] == "22 2"
    assert "give --verifier" in shown["warning"]


def test_a_truncated_shard_names_its_file(aerie, tmp_path):
    shard = write_shard(tmp_path / "shard-00000.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])

    asked = aerie("inspect", "shard", str(shard), "--json")

    problem = json.loads(asked.stdout)
    assert (asked.exit_code, problem["code"]) == (2, "inspect.tensors")
    assert str(shard) in problem["detail"]
    assert "truncated" in problem["detail"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\x10\0\0\0\0\0\0\0{}"])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)

    with pytest.raises(NotTensors, match=r"x\.safetensors"):
        read_tensors(tmp_path / "x.safetensors")


def test_runs_follow_the_mask():
    found = list(runs(np.array([5, 6, 7, 8]), np.array([1, 0, 0, 1])))

    assert [(on, ids.tolist()) for on, ids in found] == [(True, [5]), (False, [6, 7]), (True, [8])]


def offsets(*targets):
    return Stored("I64", np.array(targets) - np.arange(len(targets)))


@pytest.mark.parametrize(
    ("d2t", "says"),
    [
        (offsets(0, 4, 9), None),
        (Stored("I64", np.array([0, 4, 9])), "d2t leads to tokens 0..11"),
        (offsets(0, 9, 4), "are these offsets?"),
        (offsets(0, 4, 10), "vocab_size is 10"),
        (offsets(0, 4), "d2t has 2 entries, draft_vocab_size is 3"),
    ],
)
def test_a_wrong_draft_vocabulary_is_said(d2t, says):
    faults = vocabulary_faults({"d2t": d2t}, {"vocab_size": 10, "draft_vocab_size": 3})

    assert (faults == []) if says is None else any(says in fault for fault in faults)


def test_the_two_vocabulary_maps_must_agree():
    t2d = Stored("BOOL", np.array([1, 0, 0, 0, 1, 0, 0, 0, 1, 0], bool))

    faults = vocabulary_faults({"d2t": offsets(0, 4, 9), "t2d": t2d}, {"vocab_size": 10, "draft_vocab_size": 3})

    assert len(faults) == 1


def test_a_drafter_shows_its_layers_and_is_checked_for_nan(aerie, tmp_path):
    folder = tmp_path / "drafter" / "sglang"
    folder.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 10, "draft_vocab_size": 3}
    (folder / "config.json").write_text(json.dumps(config))
    (folder.parent / "contract.json").write_text(json.dumps({"aux_layers": [2, 4, 5]}))
    tensors = {"d2t": offsets(0, 4, 9).array, "fc.weight": np.full((2, 2), np.nan, np.float32)}
    save_file(tensors, folder / "model.safetensors")

    asked = aerie("inspect", "drafter", str(folder.parent), "--json")

    shown = json.loads(asked.stdout)
    assert asked.exit_code == 1
    assert shown["faults"] == ["fc.weight holds 4 elements that are NaN or infinite"]
    assert shown["contract"] == {"aux_layers": [2, 4, 5]}


def test_a_folder_without_a_drafter_says_what_is_missing(aerie, tmp_path):
    asked = aerie("inspect", "drafter", str(tmp_path))

    assert asked.exit_code == 2
    assert "no config.json" in asked.stderr
