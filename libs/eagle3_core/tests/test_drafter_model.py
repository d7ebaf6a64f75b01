"""What a drafter is built from, and that its files and its digest are its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core.drafter.config import Undraftable, drafter_config, read_text_config
from eagle3_core.drafter.model import Drafter, DrafterDamaged
from eagle3_core.drafter.rope import Rope
from eagle3_core.drafter.testing import random_drafter, tiny_config
from eagle3_core.drafter.verifier_parts import Teacher, VerifierParts
from eagle3_core.testing import tiny_verifier
from eagle3_core.verifier.folder import VerifierWeights

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
}  # fmt: skip
KIMI: dict[str, Any] = {
    **LLAMA, "model_type": "kimi_k2", "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "rope_scaling": {"type": "yarn", "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip


def config_of(verifier: dict[str, Any]):
    return drafter_config(verifier, algorithm="eagle3.1", aux_layers=(2, 4, 5), draft_vocab_size=10, ttt_steps=3)


def test_a_drafter_takes_over_the_verifiers_attention_shape_and_context() -> None:
    config = config_of(LLAMA)

    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.max_position_embeddings == LLAMA["max_position_embeddings"]
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_llama3_scaling_is_kept_in_either_spelling() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    old = {**LLAMA, "rope_scaling": {"rope_type": "llama3", **scaling}}
    new = {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    del new["rope_theta"]

    assert config_of(old).rope_parameters == config_of(new).rope_parameters
    assert config_of(old).rope_parameters["factor"] == 8.0


LENGTHS = {"factor": 8.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "llama3", **LENGTHS, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", **LENGTHS},
        {"rope_type": "linear", "factor": 4.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_the_rotation_is_transformers_own_with_scaling(scaling) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = config_of({**LLAMA, "rope_scaling": scaling})
    q, k, positions = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.tensor([[1, 700, 3000]])
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=dict(config.rope_parameters),
            max_position_embeddings=config.max_position_embeddings,
        )
    )  # fmt: skip

    rope = Rope(config)
    have = [rope.rotate(x.transpose(1, 2), positions).transpose(1, 2) for x in (q, k)]

    assert (rope.inverse_frequencies.tolist(), rope.scale) == (theirs.inv_freq.tolist(), theirs.attention_scaling)
    for mine, want in zip(have, apply_rotary_pos_emb(q, k, *theirs(q, positions)), strict=True):
        assert torch.allclose(mine, want, atol=1e-6)


def test_a_latent_attention_verifier_gets_a_drafter_with_plain_heads_and_plain_positions() -> None:
    config = config_of(KIMI)

    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 128)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_a_nested_language_model_is_found_and_remembers_what_it_is_nested_in(tmp_path: Path) -> None:
    outer = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": KIMI}
    (tmp_path / "config.json").write_text(json.dumps(outer))

    config = config_of(read_text_config(tmp_path))

    assert config.verifier_model_type == "kimi_k25"
    assert config.verifier_architectures == ("KimiK25ForConditionalGeneration",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "gemma2"}, "gemma2"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_verifier_whose_drafter_could_not_be_served_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(Undraftable, match=said) as caught:
        config_of({**LLAMA, **change})

    assert caught.value.remedy


def prefixed(folder: Path, files: int) -> Path:
    """The tiny verifier under the names of a multimodal checkpoint, over `files` safetensors files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    renamed = {f"language_model.{name}": t for name, t in tensors.items()}
    renamed["vision_tower.encoder.final_layernorm.weight"] = torch.zeros(3)
    renamed["vision_tower.embed_tokens_of_patches.weight"] = torch.zeros(3)
    where = {name: f"model-{i % files}.safetensors" for i, name in enumerate(sorted(renamed))}
    for file in set(where.values()):
        save_file({n: renamed[n] for n, f in where.items() if f == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def test_tensors_of_a_sharded_checkpoint_with_prefixes_are_found_by_their_ends(tmp_path: Path) -> None:
    plain = VerifierParts(tiny_verifier(tmp_path / "plain"))
    nested = VerifierParts(prefixed(tiny_verifier(tmp_path / "nested"), files=3))

    assert torch.equal(nested.embedding(), plain.embedding())
    assert torch.equal(nested.head(), plain.head())
    assert torch.equal(nested.tensor("model.norm.weight"), plain.tensor("model.norm.weight"))
    assert nested.last_layer().keys() == plain.last_layer().keys()


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    parts = VerifierParts(tiny_verifier(tmp_path, tie_word_embeddings=True))

    assert torch.equal(parts.head(), parts.embedding())


def test_a_missing_head_that_is_not_tied_is_an_error_and_not_a_random_head(tmp_path: Path) -> None:
    folder = tiny_verifier(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")

    with pytest.raises(Undraftable, match="lm_head"):
        VerifierParts(folder).head()


@pytest.mark.parametrize(
    ("name", "value", "place", "says"),
    [
        ("model.embed_tokens.weight", "nan", (317, 5), "row 317 of 320"),
        ("lm_head.weight", "inf", (9, 0), "row 9 of 320"),
        ("model.norm.weight", "-inf", (3,), "row 3 of 32"),
    ],
)
def test_a_part_that_is_no_number_is_refused_by_name_and_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, place: tuple[int, ...], says: str
) -> None:
    """Also behind the rows that are looked at first; no pass ever read the row of a token that no sample holds."""
    monkeypatch.setattr("eagle3_core.drafter.verifier_parts.ROWS_AT_ONCE", 100)
    folder = tiny_verifier(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][place] = float(value)
    save_file(tensors, folder / "model.safetensors")
    parts = VerifierParts(folder)

    with pytest.raises(VerifierWeights, match=f"{name} in .* {says}") as refused:
        (parts.embedding(), parts.norm(), parts.head())

    assert (refused.value.code, refused.value.pointer) == ("verifier.weights", "/verifier/model")


def test_a_part_that_was_read_does_not_change_with_its_file(tmp_path: Path) -> None:
    folder = tiny_verifier(tmp_path)
    file = folder / "model.safetensors"
    before = load_file(file)["model.embed_tokens.weight"].clone()
    embedding_VH = VerifierParts(folder).embedding()

    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as opened:  # over the very pages that a mapped tensor would show
        opened.seek(header)
        opened.write(bytes(file.stat().st_size - header))

    assert not VerifierParts(folder).embedding().any()
    assert torch.equal(embedding_VH, before)


def test_the_teacher_is_the_verifiers_own_distribution_over_the_draft_tokens(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_verifier(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    states: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _m, inputs: states.append(inputs[0][0].detach()))
    model.model.norm.register_forward_hook(lambda _m, _i, output: states.append(output[0].detach()))
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7, 8]])).logits[0]
    t2d_V = torch.zeros(320, dtype=torch.bool)
    t2d_V[::3] = True

    for state, kind in zip(states, ("pre", "post"), strict=True):
        have = Teacher.read(VerifierParts(folder), t2d_V, kind).probabilities(state)
        assert torch.allclose(have, logits[:, t2d_V].softmax(-1), atol=1e-5)


def test_a_saved_drafter_comes_back_with_its_digest_and_without_the_embedding(tmp_path: Path) -> None:
    folder = tiny_verifier(tmp_path / "verifier", hidden=16, vocab=320)
    drafter = random_drafter(tiny_config(vocab=320))

    drafter.save(tmp_path / "drafter")
    back = Drafter.load(tmp_path / "drafter", folder)

    assert back.digest() == drafter.digest()
    assert not any("embed" in name for name in load_file(tmp_path / "drafter" / "drafter.safetensors"))
    assert torch.equal(back.embedding_VH, VerifierParts(folder).embedding())


def test_the_digest_sees_one_changed_bit_and_the_config() -> None:
    drafter, other = random_drafter(tiny_config()), random_drafter(tiny_config())
    digest = drafter.digest()
    assert other.digest() == digest

    with torch.no_grad():
        other.weights["norm.weight"][3] += 1e-6
    deeper = Drafter.assemble(
        tiny_config(steps=4), drafter.weights, drafter.embedding_VH, drafter.d2t_Vd, drafter.t2d_V
    )

    assert len({digest, other.digest(), deeper.digest()}) == 3


def test_a_drafter_file_with_a_missing_tensor_is_refused_by_name() -> None:
    drafter = random_drafter(tiny_config())
    weights = {n: w for n, w in drafter.weights.items() if n != "fc_norm.1.weight"}

    with pytest.raises(DrafterDamaged, match=r"fc_norm\.1\.weight"):
        Drafter.assemble(drafter.config, weights, drafter.embedding_VH, drafter.d2t_Vd, drafter.t2d_V)


def test_a_vocabulary_of_absolute_ids_instead_of_offsets_is_refused() -> None:
    drafter = random_drafter(tiny_config())
    absolute = torch.arange(24) + drafter.d2t_Vd

    with pytest.raises(DrafterDamaged, match="offsets"):
        Drafter.assemble(drafter.config, drafter.weights, drafter.embedding_VH, absolute, drafter.t2d_V)


def test_in_bfloat16_a_drafter_still_decodes_and_its_gradient_reaches_the_float32_masters() -> None:
    master = random_drafter(tiny_config())

    half = master.at("cpu", torch.bfloat16)
    half.logits(half.combine(torch.randn(3, 48))).float().sum().backward()

    gradient = master.weights["fc.weight"].grad
    assert half.weights["fc.weight"].dtype == torch.bfloat16
    assert gradient is not None
    assert gradient.dtype == torch.float32
