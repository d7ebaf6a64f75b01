"""Looking into drafters without torch: what is whole is called whole, and what a loader would take in silence is said."""

import json

import numpy as np
import pytest
from hostile import damaged, odd_documents, odd_values, tensor_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inspected_files import (
    CONTRACT,
    SGLANG,
    SPECULATORS,
    V,
    drafter_tensors,
    offsets,
    write_bf16,
    write_drafter,
    write_package,
)
from safetensors.numpy import load_file, save_file

from aerie_cli.inspect.package import vocabulary_faults
from aerie_cli.inspect.tensors import Tensors
from eagle3_core import strict_json


def inspected(offline, folder) -> tuple[int, dict]:
    asked = offline("inspect", "drafter", str(folder), "--json")
    return asked.exit_code, strict_json.loads(asked.stdout)


def test_a_whole_drafter_is_called_whole(offline, tmp_path):
    status, shown = inspected(offline, write_drafter(tmp_path / "drafter"))

    assert (status, shown["faults"]) == (0, [])
    assert [package["parameters"] for package in shown["packages"]] == [272, 312]
    assert shown["contract"]["aux_layers"] == [2, 4, 5]
    told = offline("inspect", "drafter", str(tmp_path / "drafter" / "sglang")).stdout
    assert "nothing wrong with it" in told
    assert "verifier_name" in told


def change(package, tensors=None, config=None):
    """Change tensors or config of a package: a function of the drafter's folder."""

    def spoil(folder):
        place = folder / package / "model.safetensors"
        held = load_file(place)
        for name, value in (tensors or {}).items():
            if value is None:
                del held[name]
            else:
                held[name] = np.asarray(value)
        save_file(held, place)
        stated = json.loads((folder / package / "config.json").read_text())
        (folder / package / "config.json").write_text(json.dumps({**stated, **(config or {})}))

    return spoil


def contract(**changes):
    return lambda folder: (folder / "contract.json").write_text(json.dumps({**CONTRACT, **changes}))


ones = lambda *shape: np.ones(shape, np.float32)  # noqa: E731


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            change("sglang", {"fc.weight": np.full((4, 12), np.nan, np.float32)}),
            "fc.weight holds 48 elements that are NaN",
        ),
        (change("sglang", {"midlayer.mlp.up_proj.weight": None}), "midlayer.mlp.up_proj.weight is missing"),
        (change("sglang", {"fc_norm.2.weight": None}), "fc_norm.2.weight is missing"),
        (change("sglang", {"fc.weight": ones(4, 8)}), "fc.weight is [4, 8], the config promises [4, 12]"),
        (change("sglang", {"norm.weight": np.ones(4, np.int32)}), "norm.weight is stored as I32"),
        (change("sglang", {"embed_tokens.weight": ones(10, 4)}), "SGLang drops embed_tokens.weight without a word"),
        (change("sglang", {"layers.0.x": ones(1)}), "SGLang drops layers.0.x"),
        (change("sglang", {"d2t": None, "t2d": None}), "there is no d2t"),
        (change("sglang", {"d2t": [0, 4, 9]}), "d2t leads to tokens 0..11"),
        (change("sglang", {"d2t": offsets(0, 9, 4)}), "are these offsets?"),
        (change("sglang", {"d2t": [0, 1 << 62, 7]}), "is it a list of tokens?"),
        (change("sglang", {"d2t": [-1, 3, 7]}), "d2t holds offsets -1..7"),
        (change("sglang", {"d2t": np.array([0.0, np.nan, 7.0])}), "d2t is no map of tokens"),
        (change("sglang", {"d2t": [[0, 3, 7]]}), "d2t is no map of tokens"),
        (change("sglang", {"t2d": np.ones(V, bool)}), "t2d marks 10 tokens, d2t leads to 3"),
        (change("sglang", {"t2d": np.zeros(4, bool)}), "t2d has 4 entries, vocab_size is 10"),
        (change("sglang", {"lm_head.weight": ones(3, 4)}), "sglang/ and speculators/ hold different lm_head.weight"),
        (change("sglang", config={"draft_vocab_size": 5}), "d2t has 3 entries, draft_vocab_size is 5"),
        (change("sglang", config={"hidden_size": "4"}), "config.json: hidden_size"),
        (change("sglang", config={"hidden_size": 10**30}), "config.json: hidden_size"),
        (change("sglang", config={"num_attention_heads": -1}), "config.json: num_attention_heads"),
        (change("sglang", config={"vocab_size": None}), "config.json: vocab_size"),
        (change("sglang", config={"architectures": ["LlamaForCausalLM"]}), "describes no EAGLE-3 drafter"),
        (change("speculators", {"embed_tokens.weight": None}), "embed_tokens.weight is missing"),
        (change("speculators", config={"transformer_layer_config": 7}), "config.json: hidden_size"),
        (change("speculators", config={"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}), "aux_layers [2, 4, 6]"),
        (contract(hidden_size=8), "hidden_size 4, the capture contract 8"),
        (contract(vocab_size=11), "vocab_size 10, the capture contract 11"),
    ],
)
def test_what_a_loader_would_take_in_silence_is_said(offline, tmp_path, spoil, says):
    folder = write_drafter(tmp_path / "drafter")
    spoil(folder)

    status, shown = inspected(offline, folder)

    assert status == 1
    assert any(says in fault for fault in shown["faults"]), shown["faults"]
    assert "wrong: " in offline("inspect", "drafter", str(folder)).stdout


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("sglang/config.json", b"[1]", "inspect.config"),
        ("sglang/config.json", b'{"vocab_size": NaN}', "inspect.config"),
        ("sglang/config.json", b"\xff", "inspect.config"),
        ("sglang/config.json", b'{"a":' * 20_000, "inspect.config"),
        ("contract.json", b"{}", "inspect.config"),
        ("contract.json", b'{"a": "\\ud800"}', "inspect.config"),
        ("sglang/model.safetensors", b"", "inspect.tensors"),
        ("speculators/model.safetensors", b"\x02\0\0\0\0\0\0\0{}x", "inspect.tensors"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(offline, tmp_path, name, content, code):
    folder = write_drafter(tmp_path / "drafter")
    (folder / name).write_bytes(content)

    status, problem = inspected(offline, folder)

    assert (status, problem["code"]) == (2, code)
    assert str(folder / name) in problem["detail"]
    assert problem["remedy"]


@pytest.mark.parametrize("layout", ["sglang alone", "whole vocabulary", "no contract", "eagle3"])
def test_drafters_of_other_makers_and_kinds_are_whole_too(offline, tmp_path, layout):
    tensors, config = drafter_tensors(), dict(SGLANG)
    if layout == "whole vocabulary":
        tensors = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
        tensors["lm_head.weight"] = ones(V, 4)
        config["draft_vocab_size"] = None
    if layout == "eagle3":
        tensors = {name: t for name, t in tensors.items() if not name.startswith("fc_norm")}
        del config["fc_norm"], config["head_dim"], config["num_key_value_heads"]
    folder = write_package(tmp_path / "d", config, tensors)

    assert inspected(offline, folder) == (0, {**inspected(offline, folder)[1], "faults": [], "contract": None})


def test_a_speculators_folder_alone_is_read(offline, tmp_path):
    tensors = {**drafter_tensors("layers.0."), "embed_tokens.weight": ones(V, 4)}

    assert inspected(offline, write_package(tmp_path / "d", SPECULATORS, tensors))[0] == 0


def test_a_folder_without_a_drafter_says_what_is_missing(offline, tmp_path):
    asked = offline("inspect", "drafter", str(tmp_path))

    assert asked.exit_code == 2
    assert "no config.json" in asked.stderr


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32", "float64"])
def test_numbers_that_are_none_are_counted_in_every_precision(tmp_path, dtype):
    bad = {
        "uint8": ("F8_E5M2", [0x7C, 0xFF, 0x3C]), "uint16": ("BF16", [0x7F80, 0xFFC0, 0x3F80]),
        "float16": ("F16", [np.inf, np.nan, 1]), "float32": ("F32", [-np.inf, np.nan, 1]),
        "float64": ("F64", [np.inf, np.nan, 1]),
    }  # fmt: skip
    stored, values = bad[dtype]
    raw = np.array(values, dtype).tobytes()
    header = json.dumps({"x": {"dtype": stored, "shape": [3], "data_offsets": [0, len(raw)]}}).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + raw)

    assert Tensors(tmp_path / "x").scan("x").not_finite == 2


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error_and_no_crash(tmp_path):
    from aerie_cli.inspect.tensors import NotTensors

    path = write_bf16(tmp_path / "x", {"x": np.ones(1000, np.float32)}, {})
    tensors = Tensors(path)
    path.write_bytes(path.read_bytes()[:200])

    with pytest.raises(NotTensors, match="cut short"):
        tensors.scan("x")


CLI = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
FILES = ("sglang/config.json", "sglang/model.safetensors", "contract.json", "speculators/config.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A drafter and the bytes of its files."""
    folder = write_drafter(tmp_path_factory.mktemp("whole"))
    return folder, {name: (folder / name).read_bytes() for name in FILES}


@CLI
@given(data=st.data())
def test_any_bytes_in_any_file_are_a_picture_with_faults_or_a_typed_error(offline, whole, data):
    folder, contents = whole
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    name = data.draw(st.sampled_from(FILES))
    if name.endswith(".json"):
        document = json.loads(contents[name])
        field = st.sampled_from(sorted(document))
        changed = st.tuples(field, odd_values).map(lambda pair: json.dumps({**document, pair[0]: pair[1]}).encode())
        content = data.draw(changed | damaged(contents[name]) | odd_documents)
    else:
        content = data.draw(damaged(contents[name]) | tensor_files(("d2t", "t2d", "fc.weight"), "format"))
    (folder / name).write_bytes(content)

    asked = offline("inspect", "drafter", str(folder), "--json")

    said = strict_json.loads(asked.stdout)
    if "packages" in said:
        assert asked.exit_code == (1 if said["faults"] else 0)
    else:
        assert asked.exit_code == 2
        assert said["remedy"]


@pytest.mark.parametrize(
    ("d2t", "says"),
    [
        (offsets(0, 4, 9), None),
        (np.array([0, 4, 9]), "d2t leads to tokens 0..11"),
        (offsets(0, 9, 4), "are these offsets?"),
        (offsets(0, 4, 10), "vocab_size is 10"),
        (offsets(0, 4), "d2t has 2 entries, draft_vocab_size is 3"),
    ],
)
def test_a_wrong_draft_vocabulary_is_said(d2t, says):
    faults = vocabulary_faults(d2t, None, 3, 10)

    assert (faults == []) if says is None else any(says in fault for fault in faults)


def test_the_two_vocabulary_maps_must_agree():
    t2d = np.array([1, 0, 0, 0, 1, 0, 0, 0, 1, 0], bool)

    assert len(vocabulary_faults(offsets(0, 4, 9), t2d, 3, 10)) == 1
