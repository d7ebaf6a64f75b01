"""A verifier's folder is of one model, or it is refused by what its config says and what its files hold."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle3_core.testing import tiny_tokenizer, tiny_verifier
from eagle3_core.verifier.folder import VerifierFault
from eagle3_core.verifier.identity import inspect

Spoil = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tiny_verifier(tmp_path / "verifier")


def says(file: str = "config.json", **fields) -> Spoil:
    """Change fields of a JSON file; None takes one out."""

    def spoil(folder: Path) -> None:
        place = folder / file
        document = {**json.loads(place.read_text()), **fields}
        place.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))

    return spoil


def weights(change: Callable[[dict], None]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


def without(*names: str) -> Spoil:
    return weights(lambda tensors: [tensors.pop(name) for name in names])


def with_(**shapes: tuple[int, ...]) -> Spoil:
    added = {name.replace("__", "."): np.ones(shape, np.float32) for name, shape in shapes.items()}
    return weights(lambda tensors: tensors.update(added))


def both(*spoils: Spoil) -> Spoil:
    return lambda folder: [spoil(folder) for spoil in spoils] and None


def added_token(text: str, number: object, special: bool) -> Spoil:
    def spoil(folder: Path) -> None:
        place = folder / "tokenizer.json"
        document = json.loads(place.read_text())
        document["added_tokens"].append(
            {**document["added_tokens"][0], "content": text, "id": number, "special": special}
        )
        place.write_text(json.dumps(document))

    return spoil


def refused(folder: Path) -> VerifierFault:
    with pytest.raises(VerifierFault) as caught:
        inspect(folder)
    assert caught.value.pointer == "/verifier/model"
    assert caught.value.remedy
    return caught.value


LAST = "model.layers.7."

CONTRADICTIONS: dict[str, tuple[Spoil, str, str]] = {
    "a wider model": (says(hidden_size=64), "hidden_size=64", "[320, 32]"),
    "a smaller vocabulary": (says(vocab_size=319), "vocab_size=319", "[320, 32]"),
    "a larger vocabulary": (says(vocab_size=321), "vocab_size=321", "[320, 32]"),
    "more layers": (says(num_hidden_layers=9), "num_hidden_layers=9", "nothing of model.layers.8"),
    "fewer layers": (says(num_hidden_layers=7), "num_hidden_layers=7", "model.layers.7 too"),
    "more heads": (says(num_attention_heads=8), "num_attention_heads=8", "q_proj.weight in shape [32, 32] instead of [64, 32]"),
    "fewer key-value heads": (says(num_key_value_heads=1), "num_key_value_heads=1", "k_proj.weight in shape [16, 32]"),
    "heads of another size": (says(head_dim=16), "head_dim=16", "q_proj.weight in shape [32, 32]"),
    "another inner size": (says(intermediate_size=65), "intermediate_size=65", "gate_proj.weight in shape [64, 32]"),
    "a tied head that is another tensor": (says(tie_word_embeddings=True), "tie_word_embeddings=true", "lm_head.weight"),
    "an untied head that is not there": (without("lm_head.weight"), "tie_word_embeddings=false", "no output head"),
    "a head of another shape": (
        both(without("lm_head.weight"), with_(lm_head__weight=(300, 32))), "vocab_size=320", "[300, 32]"
    ),
    "biases that the config switches off": (
        with_(**{f"model__layers__{i}__self_attn__q_proj__bias": (32,) for i in range(8)}), "llama", "self_attn.q_proj.bias"
    ),
    "a layer behind the last": (with_(model__layers__8__input_layernorm__weight=(32,)), "num_hidden_layers=8", "layers.8"),
    "kinds of another number of layers": (says(layer_types=["full_attention"] * 7), "num_hidden_layers=8", "7 layer_types"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CONTRADICTIONS))
def test_config_and_weights_of_two_models_are_refused_and_both_sides_named(folder, name):
    spoil, config, held = CONTRADICTIONS[name]
    spoil(folder)

    error = refused(folder)

    assert error.code == "verifier.mismatch"
    assert config in error.detail
    assert held in error.detail


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("model.embed_tokens.weight",), "embed_tokens.weight"),
        (("model.norm.weight",), "model.norm.weight"),
        ((LAST + "mlp.up_proj.weight",), "mlp.up_proj.weight of layer 7"),
        (tuple(f"model.layers.{i}.self_attn.k_proj.weight" for i in range(8)), "self_attn.k_proj.weight of layer 0"),
        ((LAST + "mlp.up_proj.weight", LAST + "mlp.gate_proj.weight"), "(2 tensors are missing there)"),
    ],
)
def test_a_missing_tensor_is_named(folder, names, says):
    without(*names)(folder)

    error = refused(folder)

    assert error.code == "verifier.weights"
    assert says in error.detail


@pytest.mark.parametrize(
    "value", [True, False, 0, -1, 1.5, "32", [32], {}, 1 << 31, 10**30, float("inf")], ids=lambda value: repr(value)[:9]
)
@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
              "max_position_embeddings", "intermediate_size"],
)  # fmt: skip
def test_what_is_no_size_is_refused_by_its_field(folder, field, value):
    says(**{field: value})(folder)

    error = refused(folder)

    assert error.code == "verifier.config"
    assert field in error.detail or "Infinity" in error.detail


@pytest.mark.parametrize("value", ["false", 1, 0.0, []])
def test_what_is_no_switch_is_refused_by_its_field(folder, value):
    says(tie_word_embeddings=value)(folder)

    error = refused(folder)

    assert (error.code, "tie_word_embeddings" in error.detail) == ("verifier.config", True)


@pytest.mark.parametrize("value", [True, -1, 320, 10**30, 2.0, "2", [2, 320], [True], [[2]], {"id": 2}, [None]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_that_is_no_token_is_refused_by_its_file(folder, file, value):
    says(file, eos_token_id=value)(folder)

    error = refused(folder)

    assert error.code == "verifier.config"
    assert f"{file} says eos_token_id=" in error.detail
    assert "0 to 319" in error.detail


@pytest.mark.parametrize("role", ["bos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", [True, 320, -2, "2"])
def test_a_padding_or_beginning_outside_the_vocabulary_is_refused(folder, role, value):
    says("config.json", **{role: value})(folder)

    assert f"config.json says {role}=" in refused(folder).detail


def test_a_padding_of_minus_one_is_none(folder):
    for file in ("config.json", "generation_config.json"):
        says(file, pad_token_id=-1)(folder)
    says("tokenizer_config.json", pad_token=None)(folder)

    assert inspect(folder).pad_token_id is None


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder):
    tiny_tokenizer(400).save(str(folder / "tokenizer.json"))

    error = refused(folder)

    assert error.code == "verifier.mismatch"
    assert "token 399" in error.detail
    assert "320 rows" in error.detail


def test_a_special_token_beyond_the_embedding_matters_only_if_the_template_writes_it(folder):
    added_token("<|image|>", 320, special=True)(folder)
    assert inspect(folder).vocab_size == 320
    template = folder / "chat_template.jinja"

    template.write_text(template.read_text() + "<|image|>")

    assert "token 320 ('<|image|>')" in refused(folder).detail


def test_an_ordinary_added_token_beyond_the_embedding_is_refused(folder):
    added_token("wow", 320, special=False)(folder)

    assert "token 320 ('wow')" in refused(folder).detail


@pytest.mark.parametrize("number", [True, -1, "7", 1.5, None])
def test_a_token_whose_id_is_no_number_is_refused(folder, number):
    added_token("wow", number, special=False)(folder)

    error = refused(folder)

    assert (error.code, "'wow' has the id" in error.detail) == ("verifier.tokenizer", True)


@pytest.mark.parametrize("kind", ["llamas", "", 3, ["llama"], None])
def test_a_type_that_nobody_knows_is_refused(folder, kind):
    says(model_type=kind)(folder)

    error = refused(folder)

    assert (error.code, "model_type=" in error.detail) == ("verifier.unsupported", True)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gpt_oss", "attention sinks"),
        ("gemma2", "1 + w"),
        ("qwen3_next", "without softmax"),
        ("stablelm", "layer norm"),
    ],
)
def test_a_type_that_no_drafter_can_be_made_for_is_refused_by_what_it_does(folder, kind, why):
    says(model_type=kind)(folder)

    error = refused(folder)

    assert error.code == "verifier.unsupported"
    assert why in error.detail


def test_layers_of_a_kind_that_is_not_computed_are_refused(folder):
    says(layer_types=["full_attention"] * 7 + ["linear_attention"])(folder)

    assert "linear_attention" in refused(folder).detail


def test_layers_that_predict_further_tokens_may_lie_behind_the_last(folder):
    with_(**{f"model__layers__8__{name}": (32,) for name in ("enorm__weight", "hnorm__weight")})(folder)
    says(num_nextn_predict_layers=1)(folder)

    assert inspect(folder).num_layers == 8


def test_a_tied_head_that_is_stored_twice_is_tied(tmp_path):
    folder = tiny_verifier(tmp_path / "tied", tie_word_embeddings=True)
    weights(lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))(folder)

    assert inspect(folder).tie_word_embeddings


def sharded(folder: Path, weight_map: Callable[[dict[str, str]], dict[str, str]]) -> None:
    """Two files, half of the tensors in each, and an index that says `weight_map` of the truth."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({n: tensors[n] for n, f in where.items() if f == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map(where)}))


@pytest.mark.parametrize(
    "lie",
    [
        lambda where: {**where, "model.norm.weight": "model-0.safetensors", "lm_head.weight": "model-1.safetensors"},
        lambda where: {**where, "model.layers.8.x": "model-0.safetensors"},
        lambda where: {k: v for k, v in where.items() if k != "model.norm.weight"},
    ],
)
def test_an_index_that_puts_a_tensor_elsewhere_is_refused(folder, lie):
    sharded(folder, lie)

    error = refused(folder)

    assert error.code == "verifier.weights"
    assert "the index puts" in error.detail


def test_the_same_tensor_in_two_files_is_refused(folder):
    sharded(folder, dict)
    first, second = (load_file(folder / f"model-{i}.safetensors") for i in range(2))
    save_file({**first, min(second): second[min(second)]}, folder / "model-0.safetensors")

    assert "both model-0.safetensors and model-1.safetensors" in refused(folder).detail


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 10**30]},
        {"shape": [1]},
        [],
    ],
)
def test_a_header_that_contradicts_itself_is_refused(folder, entry):
    header = json.dumps({"model.norm.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))

    error = refused(folder)

    assert error.code == "verifier.weights"
    assert "model.safetensors" in error.detail


def test_a_file_that_cannot_be_read_is_named(folder, monkeypatch):
    def denied(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("eagle3_core.verifier.identity.digest_file", denied)

    error = refused(folder)

    assert (error.code, "tokenizer.json cannot be read: Permission denied" in error.detail) == (
        "verifier.missing",
        True,
    )


def test_a_template_of_megabytes_is_no_template(folder):
    (folder / "chat_template.jinja").write_text("x" * (1 << 20) + "y")

    assert refused(folder).code == "verifier.chat_template"
