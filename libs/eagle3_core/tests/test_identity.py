"""A verifier is known by what decides its words, not by where it lies; what cannot be used is refused with a remedy."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from eagle3_core.testing import CHATML, tiny_verifier
from eagle3_core.verifier.folder import (
    VerifierConfig,
    VerifierFault,
    VerifierMissing,
    VerifierRemoteCode,
    VerifierTemplate,
    VerifierTokenizer,
    VerifierWeights,
)
from eagle3_core.verifier.identity import inspect


@pytest.fixture
def folder(tmp_path) -> Path:
    return tiny_verifier(tmp_path / "verifier", layers=7, hidden=32, vocab=320)


def edit(path: Path, **fields) -> None:
    document = json.loads(path.read_text())
    document.update({k: v for k, v in fields.items() if v is not None})
    for key in [k for k, v in fields.items() if v is None]:
        document.pop(key, None)
    path.write_text(json.dumps(document))


def refusal(folder: Path, kind: type[VerifierFault]) -> VerifierFault:
    with pytest.raises(kind) as caught:
        inspect(folder)
    assert type(caught.value) is kind
    assert caught.value.pointer == "/verifier/model"
    assert caught.value.remedy
    return caught.value


def shard(folder: Path) -> Path:
    """Turn the single weight file into an indexed checkpoint of one shard; returns the shard."""
    part = folder / "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(part)
    index = {"weight_map": dict.fromkeys(load_file(part), part.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return part


def test_a_folder_tells_its_sizes_and_tokens(folder):
    who = inspect(folder, revision="r1")

    assert (who.name, who.revision, who.model_type, who.architecture) == ("verifier", "r1", "llama", "LlamaForCausalLM")
    assert (who.hidden_size, who.num_layers, who.num_heads, who.num_kv_heads, who.head_dim) == (32, 7, 4, 2, 8)
    assert (who.vocab_size, who.max_position_embeddings, who.tie_word_embeddings) == (320, 2048, False)
    assert (who.eos_token_ids, who.bos_token_id, who.pad_token_id) == ((2,), 1, 2)
    assert who.chat_template == CHATML
    assert "self_attn.q_proj.weight" in who.last_layer


def test_a_moved_copy_is_the_same_verifier(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "elsewhere")

    assert inspect(copy).digest == inspect(folder).digest


@pytest.mark.parametrize(
    ("file", "fields", "part"),
    [
        ("config.json", {"rms_norm_eps": 1e-6}, "config_digest"),
        ("tokenizer_config.json", {"add_bos_token": True}, "tokenizer_digest"),
    ],
)
def test_a_change_shows_in_its_own_digest_and_in_the_whole(folder, file, fields, part):
    before = inspect(folder)
    edit(folder / file, **fields)

    after = inspect(folder)

    parts = ("config_digest", "tokenizer_digest", "chat_template_digest", "weights_digest")
    assert [p for p in parts if getattr(before, p) != getattr(after, p)] == [part]
    assert before.digest != after.digest


def test_other_weights_are_another_verifier(folder, tmp_path):
    other = tiny_verifier(tmp_path / "other", layers=7, seed=1)

    assert inspect(other).weights_digest != inspect(folder).weights_digest
    assert inspect(other).config_digest == inspect(folder).config_digest


def test_another_end_of_answers_is_another_verifier(folder):
    before = inspect(folder)
    edit(folder / "generation_config.json", eos_token_id=[5, 7])

    assert set(inspect(folder).eos_token_ids) > set(before.eos_token_ids)
    assert inspect(folder).digest != before.digest


def test_a_tensor_changed_in_place_is_another_verifier_even_far_inside_a_file(tmp_path):
    folder = tiny_verifier(tmp_path / "wide", hidden=256, vocab=4096)
    before = inspect(folder).weights_digest
    place = folder / "model.safetensors"
    length = int.from_bytes(place.read_bytes()[:8], "little")
    header = json.loads(place.read_bytes()[8 : 8 + length])
    middle = header["model.layers.3.mlp.up_proj.weight"]["data_offsets"][0] + 8 + length
    data = bytearray(place.read_bytes())
    assert 1 << 20 < middle < len(data) - (1 << 20)
    data[middle] ^= 1
    place.write_bytes(data)

    assert inspect(folder).weights_digest != before


def test_a_stretch_that_was_lost_within_a_tensor_is_another_verifier(tmp_path):
    folder = tiny_verifier(tmp_path / "wide", hidden=512, vocab=8192)
    place = folder / "model.safetensors"
    before, data = inspect(folder).weights_digest, place.read_bytes()
    length = int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8 : 8 + length])["model.embed_tokens.weight"]["data_offsets"]
    assert stop - start > 8 << 20
    hole = slice(8 + length + start + (4 << 20) + 5000, 8 + length + start + (5 << 20) + 5000)

    place.write_bytes(data[: hole.start] + bytes(1 << 20) + data[hole.stop :])

    assert inspect(folder).weights_digest != before


def test_a_template_in_the_tokenizer_config_is_the_same_template(folder):
    before = inspect(folder)
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    edit(folder / "tokenizer_config.json", chat_template=named)

    assert inspect(folder).digest == before.digest


def test_a_nested_config_is_read_where_the_language_model_is(folder):
    inner = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": inner}
    (folder / "config.json").write_text(json.dumps(outer))

    who = inspect(folder)

    assert (who.model_type, who.hidden_size, who.num_layers, who.vocab_size) == ("kimi_k25", 32, 7, 320)
    assert who.text_config["model_type"] == "llama"


def test_every_token_that_ends_an_answer_is_known(folder):
    edit(folder / "generation_config.json", eos_token_id=[0, 2])
    edit(folder / "config.json", eos_token_id=None)

    assert inspect(folder).eos_token_ids == (0, 2)


def test_weights_without_a_head_are_tied(tmp_path):
    assert inspect(tiny_verifier(tmp_path / "tied", tie_word_embeddings=True)).tie_word_embeddings


def test_an_unknown_path_is_named(tmp_path):
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere", VerifierMissing).detail


def test_a_folder_without_config_is_no_checkpoint(folder):
    (folder / "config.json").unlink()

    assert "config.json" in refusal(folder, VerifierMissing).detail


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff"])
def test_an_unreadable_config_is_named(folder, text):
    (folder / "config.json").write_text(text, encoding="latin-1")

    assert "config.json" in refusal(folder, VerifierConfig).detail


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size", None), ("num_hidden_layers", 0), ("vocab_size", "many"), ("hidden_size", True)]
)
def test_a_config_without_a_size_names_the_field(folder, field, value):
    edit(folder / "config.json", **{field: value})

    assert field in refusal(folder, VerifierConfig).detail


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_verifier_without_tokenizer_is_refused(folder, name):
    (folder / name).unlink()

    assert name in refusal(folder, VerifierTokenizer).detail


def test_a_tokenizer_of_another_release_is_refused(folder):
    edit(folder / "tokenizer_config.json", eos_token="<|other_end|>")

    assert "<|other_end|>" in refusal(folder, VerifierTokenizer).detail


def test_a_verifier_that_never_stops_is_refused(folder):
    for file in ("config.json", "generation_config.json"):
        edit(folder / file, eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)

    assert "end-of-turn" in refusal(folder, VerifierTokenizer).detail


@pytest.mark.parametrize("template", [None, "", " \n"])
def test_a_verifier_without_chat_template_is_refused(tmp_path, template):
    folder = tiny_verifier(tmp_path / "base", chat_template=template)

    assert "chat_template.jinja" in refusal(folder, VerifierTemplate).detail


def test_named_templates_without_a_default_are_refused(folder):
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=[{"name": "tool_use", "template": "x"}])

    refusal(folder, VerifierTemplate)


def test_a_verifier_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()

    refusal(folder, VerifierWeights)


def test_pickled_weights_are_never_opened(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    assert "pickle" in refusal(folder, VerifierWeights).detail


def test_an_index_names_the_shard_that_is_missing(folder):
    part = shard(folder)
    assert inspect(folder).num_layers == 7
    part.unlink()

    assert part.name in refusal(folder, VerifierWeights).detail


def test_an_index_cannot_point_outside_its_folder(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    (folder.parent / "other.safetensors").write_bytes(b"")

    assert "../other.safetensors" in refusal(folder, VerifierWeights).detail


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"version https://git-lfs", lambda data: b""])
def test_a_damaged_weight_file_is_named(folder, damage):
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))

    assert str(path) in refusal(folder, VerifierWeights).detail


def test_code_from_a_checkpoint_is_never_executed(folder):
    edit(folder / "config.json", model_type="novel", auto_map={"AutoModelForCausalLM": "modeling_novel.Novel"})

    assert "modeling_novel.Novel" in refusal(folder, VerifierRemoteCode).detail


def test_a_model_type_that_transformers_knows_needs_no_code(folder):
    edit(folder / "config.json", auto_map={"AutoConfig": "configuration_llama.LlamaConfig"})

    assert inspect(folder).model_type == "llama"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", '{"hidden_size": NaN}'),
        ("tokenizer_config.json", '{"x": Infinity}'),
        ("config.json", '{"x": "\\ud800"}'),
        ("tokenizer.json", '{"model": "x"}'),
        ("tokenizer.json", '{"model": {}, "added_tokens": [1, null]}'),
    ],
)
def test_odd_json_is_the_verifiers_fault_and_said_so(folder, file, text):
    (folder / file).write_text(text)

    with pytest.raises(VerifierFault) as refused:
        inspect(folder)

    assert refused.value.pointer == "/verifier/model"
    assert refused.value.remedy


@pytest.mark.parametrize("architectures", [3, True, {"a": 1}, [], None])
def test_an_odd_list_of_architectures_is_no_crash(folder, architectures):
    edit(folder / "config.json", architectures=architectures)

    assert inspect(folder).architecture == ""
