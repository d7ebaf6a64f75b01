"""speculators' own module is the reference: the same loss and every gradient, and checkpoints that it loads itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_core.drafter import losses
from eagle3_core.drafter.build import build, speculators_module
from eagle3_core.drafter.config import Undraftable
from eagle3_core.drafter.export import (
    ExportMismatch,
    load_speculators,
    prefill_logits,
    probe,
    read_sglang,
    require_same,
    speculators_logits,
    write_sglang,
    write_speculators,
)
from eagle3_core.drafter.initial import initial_weights
from eagle3_core.drafter.losses import LossName, Objective
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.step import batch_loss
from eagle3_core.drafter.testing import MemorySamples, pack, random_samples, tiny_config
from eagle3_core.drafter.verifier_parts import Teacher, VerifierParts
from eagle3_core.testing import tiny_verifier

VOCAB, DRAFT, AUX = 320, 64, (2, 4, 5)
CONTEXT = 8192
"""Of the verifiers whose drafters are exported: more than the 2048 that a Llama config says by default."""


def draft_tokens(size: int = DRAFT) -> tuple[Tensor, Tensor]:
    """(d2t, t2d) of random tokens."""
    tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:size].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[tokens] = True
    return tokens - torch.arange(size), t2d


def built(folder: Path, algorithm: Any = "eagle3.1", init: Any = "random", size: int = DRAFT, **more: Any) -> Drafter:
    d2t, t2d = draft_tokens(size)
    return build(
        folder, algorithm=algorithm, init=init, aux_layers=AUX, ttt_steps=3, d2t_Vd=d2t, t2d_V=t2d, seed=0, **more
    )


def as_module(drafter: Drafter, teacher: Teacher) -> Any:
    """speculators' module with the drafter's weights; its head trains, as ours does."""
    module = speculators_module(drafter.config, None, seed=1)
    named = dict(module.named_parameters())
    with torch.no_grad():
        for name, weight in drafter.weights.items():
            named[name].copy_(weight)
        module.embed_tokens.weight.copy_(drafter.embedding_VH)
        module.verifier_lm_head.weight.copy_(teacher.head_VdH)
        module.verifier_norm.weight.copy_(teacher.norm_H)
    module.load_vocab_mappings(drafter.t2d_V, drafter.d2t_Vd)
    module.lm_head.weight.requires_grad_(True)
    return module


@pytest.mark.parametrize("algorithm", ["eagle3.1", "eagle3"])
@pytest.mark.parametrize("size", [DRAFT, VOCAB])
@pytest.mark.parametrize("seed", [0, 7])
def test_a_drafter_starts_from_the_bits_of_that_librarys_fresh_module(algorithm, size, seed) -> None:
    config = tiny_config(algorithm, heads=4, kv_heads=1).model_copy(
        update={"vocab_size": VOCAB, "draft_vocab_size": size, "initializer_range": 0.03}
    )
    theirs = dict(speculators_module(config, None, seed).named_parameters())

    ours = initial_weights(config, seed)

    assert ours.keys() <= theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num())] == []
    assert theirs["lm_head.weight"].isnan().all()
    assert ours["lm_head.weight"].isnan().all()


def their_batch(samples: MemorySamples) -> dict[str, Tensor]:
    """The library's own shift, document by document, packed."""
    from speculators.models.eagle3.data import shift_batch

    items: list[dict[str, Tensor]] = []
    for number, sample in enumerate(samples.samples):
        length = len(sample.input_ids)
        final = torch.full((length, sample.final.shape[1]), 0.0)
        final[sample.final_index.long()] = sample.final
        item = shift_batch(
            {
                "input_ids": sample.input_ids.long(),
                "hidden_states": sample.aux,
                "verifier_last_hidden_states": final,
                "loss_mask": sample.loss_mask.bool(),
                "lengths": torch.tensor([length]),
                "position_ids": torch.arange(length),
            }
        )
        item.pop("lengths")
        items.append({**item, "document_ids": torch.full((length - 1,), number)})
    return {key: torch.cat([item[key] for item in items])[None] for key in items[0]}


# Documents begin with three unsupervised tokens: there the library lets later steps look into the next document.
MASKS = ["000" + "11011111011", "000" + "1", "0000" + "111111", "00010101"]
THEIR_LOSS: dict[LossName, str] = {"kl": "kl_div", "tv": "tv", "lk": "lk_hybrid"}


@pytest.mark.parametrize("algorithm", ["eagle3.1", "eagle3"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("loss", THEIR_LOSS)
def test_loss_and_every_gradient_equal_speculators_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, kv_heads: int, loss: LossName
) -> None:
    from speculators.losses import resolve_loss_config

    folder = tiny_verifier(tmp_path, kv_heads=kv_heads)
    drafter, samples = built(folder, algorithm), random_samples(MASKS, hidden=32, vocab=VOCAB)
    teacher, batch = Teacher.read(VerifierParts(folder), drafter.t2d_V, "pre"), pack(samples, 3, "speculators")
    module = as_module(drafter, teacher)
    _, theirs, metrics = module(
        **their_batch(samples), ttt_steps=3, loss_config=resolve_loss_config(THEIR_LOSS[loss], "eager")
    )
    theirs.backward()

    # Theirs is a sum over steps of each step's own mean; ours is one mean. So give ours their reduction.
    seen: list[Tensor] = []

    def their_reduction(
        _: Objective, distance_MK: Tensor, __: Tensor | None, valid_MK: Tensor
    ) -> tuple[Tensor, Tensor]:
        steps_K = (distance_MK * valid_MK).sum(0) / valid_MK.sum(0)
        seen.append(steps_K)
        return steps_K.sum(), torch.ones(())

    monkeypatch.setattr(losses, "reduce_pairs", their_reduction)
    ours, _, _ = batch_loss(drafter, teacher, batch, Objective(3, loss))
    ours.backward()

    for k, value in enumerate(seen[-1]):
        assert float(value) == pytest.approx(float(metrics[f"loss_{k}_sum"]), rel=1e-5)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    named = dict(module.named_parameters())
    for name, weight in drafter.weights.items():
        gap = (weight.grad - named[name].grad).norm() / named[name].grad.norm()
        assert float(gap) < 1e-5, name


def test_a_new_drafter_starts_with_the_verifiers_head_and_the_seed_decides_the_rest(tmp_path: Path) -> None:
    folder = tiny_verifier(tmp_path)
    before = torch.random.get_rng_state()

    one, same = built(folder), built(folder)

    assert torch.equal(one.weights["lm_head.weight"], VerifierParts(folder).head()[one.t2d_V])
    assert one.digest() == same.digest()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(w.requires_grad for w in one.weights.values())
    assert not built(folder, train_lm_head=False).weights["lm_head.weight"].requires_grad


def test_a_drafter_started_from_the_verifiers_layer_is_that_layer_on_the_last_aux_state(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_verifier(tmp_path)
    drafter = built(folder, "eagle3", "verifier_layer")
    with torch.no_grad():  # what stays random: the embedding's half, and a tenth of fc
        for name in ("q_proj", "k_proj", "v_proj"):
            drafter.weights[f"layers.0.self_attn.{name}.weight"][:, :32] = 0
        drafter.weights["fc.weight"][:] = 0
        drafter.weights["fc.weight"][:, 64:] = torch.eye(32)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    states = torch.randn(1, 6, 32)
    positions = torch.arange(1, 7)[None]
    with torch.no_grad():
        rotary = model.model.rotary_emb(states, positions)
        mask = torch.full((6, 6), float("-inf")).triu(1)[None, None]
        out = model.model.layers[-1](states, attention_mask=mask, position_embeddings=rotary)
        want = model.lm_head(model.model.norm(out))[0][:, drafter.t2d_V]

        have = prefill_logits(drafter, torch.cat([torch.zeros(6, 64), states[0]], -1), torch.arange(6))

    assert torch.allclose(have, want, atol=1e-4)


@pytest.mark.parametrize("broken", ["missing", "bias", "shape"])
def test_a_last_layer_that_does_not_fit_is_refused_and_both_sides_are_named(tmp_path: Path, broken: str) -> None:
    folder = tiny_verifier(tmp_path)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.7.mlp.up_proj.weight"
    if broken == "missing":
        del tensors[name]
    elif broken == "bias":
        tensors["model.layers.7.self_attn.q_proj.bias"] = torch.zeros(32)
    else:
        tensors[name] = torch.zeros(50, 32)
    save_file(tensors, folder / "model.safetensors")

    with pytest.raises(Undraftable, match="last layer does not fit") as caught:
        built(folder, init="verifier_layer")

    assert caught.value.pointer == "/training/init"


def test_a_drafter_of_the_deepest_training_is_exported_like_any_other(tmp_path: Path) -> None:
    folder = tiny_verifier(tmp_path / "verifier")
    drafter, parts = built(folder), VerifierParts(folder)
    deep = replace(drafter, config=drafter.config.model_copy(update={"ttt_steps": 16}))

    write_sglang(deep, tmp_path / "sglang", torch.float32)
    write_speculators(
        deep, tmp_path / "speculators", torch.float32, str(folder), Teacher.read(parts, deep.t2d_V, "pre")
    )

    require_same(deep, torch.float32, tmp_path / "sglang", tmp_path / "speculators", parts)


@pytest.mark.parametrize("algorithm", ["eagle3.1", "eagle3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [DRAFT, VOCAB])
def test_both_exports_give_the_trained_drafters_logits(
    tmp_path: Path, algorithm: str, dtype: torch.dtype, size: int
) -> None:
    folder = tiny_verifier(tmp_path / "verifier", max_position_embeddings=CONTEXT)
    drafter, parts = built(folder, algorithm, size=size), VerifierParts(folder)
    teacher = Teacher.read(parts, drafter.t2d_V, "pre")

    write_sglang(drafter, tmp_path / "sglang", dtype)
    write_speculators(drafter, tmp_path / "speculators", dtype, str(folder), teacher)

    require_same(drafter, dtype, tmp_path / "sglang", tmp_path / "speculators", parts)
    rounded = drafter.at("cpu", dtype).at("cpu", torch.float32)
    assert torch.equal(
        prefill_logits(read_sglang(tmp_path / "sglang", parts), *probe(drafter)),
        prefill_logits(rounded, *probe(drafter)),
    )


def test_speculators_own_loader_finds_the_verifier_by_the_path_in_the_config(tmp_path: Path) -> None:
    from speculators import SpeculatorModel

    folder = tiny_verifier(tmp_path / "verifier", max_position_embeddings=CONTEXT)
    drafter = built(folder)
    write_speculators(
        drafter, tmp_path / "out", torch.float32, str(folder), Teacher.read(VerifierParts(folder), drafter.t2d_V, "pre")
    )

    module = SpeculatorModel.from_pretrained(str(tmp_path / "out"))

    assert module.target_layer_ids == list(AUX)
    assert module.config.transformer_layer_config.max_position_embeddings == CONTEXT
    assert torch.equal(module.d2t, drafter.d2t_Vd)
    assert torch.equal(module.fc.weight, drafter.weights["fc.weight"])
    assert not any(p.isnan().any() for p in module.parameters())


def test_the_sglang_directory_is_flat_and_complete(tmp_path: Path) -> None:
    from transformers import AutoConfig

    drafter = built(tiny_verifier(tmp_path / "verifier", max_position_embeddings=CONTEXT))
    write_sglang(drafter, tmp_path / "sglang", torch.bfloat16)

    config, tensors = (
        AutoConfig.from_pretrained(tmp_path / "sglang"),
        load_file(tmp_path / "sglang" / "model.safetensors"),
    )

    assert config.architectures == ["LlamaForCausalLMEagle3"]
    assert (config.draft_vocab_size, config.vocab_size, config.num_hidden_layers) == (DRAFT, VOCAB, 1)
    assert config.max_position_embeddings == CONTEXT
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.eagle_config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert (config.fc_norm, config.norm_output, config.tie_word_embeddings) == (True, True, False)
    assert {str(t.dtype) for t in tensors.values()} == {"torch.bfloat16", "torch.int64", "torch.bool"}
    assert {n.split(".")[0] for n in tensors} == {"fc", "fc_norm", "midlayer", "norm", "lm_head", "d2t", "t2d"}


@pytest.mark.parametrize("fault", ["layer ids", "switch", "weights", "vocabulary", "speculators"])
def test_an_export_that_went_wrong_is_noticed(tmp_path: Path, fault: str) -> None:
    folder = tiny_verifier(tmp_path / "verifier")
    drafter, parts = built(folder), VerifierParts(folder)
    sglang, other = tmp_path / "sglang", tmp_path / "speculators"
    write_sglang(drafter, sglang, torch.float32)
    write_speculators(drafter, other, torch.float32, str(folder), Teacher.read(parts, drafter.t2d_V, "pre"))
    config = json.loads((sglang / "config.json").read_text())
    tensors = load_file((other if fault == "speculators" else sglang) / "model.safetensors")
    if fault == "layer ids":
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(AUX)
    elif fault == "switch":
        config["rope_theta"] = 500.0
    elif fault == "weights":
        tensors["midlayer.self_attn.k_proj.weight"] *= 1.01
    elif fault == "vocabulary":
        config["draft_vocab_size"] = DRAFT
        shifted = (torch.arange(DRAFT) + drafter.d2t_Vd - 1).clamp(min=0).unique()
        tensors["d2t"] = torch.cat([shifted, torch.arange(VOCAB - DRAFT + len(shifted), VOCAB)]) - torch.arange(DRAFT)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        tensors["t2d"][tensors["d2t"] + torch.arange(DRAFT)] = True
    else:
        tensors["norm.weight"] *= 1.01
    (sglang / "config.json").write_text(json.dumps(config))
    save_file(tensors, (other if fault == "speculators" else sglang) / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ExportMismatch):
        require_same(drafter, torch.float32, sglang, other, parts)


@pytest.mark.parametrize("package", ["sglang", "speculators"])
def test_an_exported_context_that_is_not_the_verifiers_is_refused(tmp_path: Path, package: str) -> None:
    folder = tiny_verifier(tmp_path / "verifier", max_position_embeddings=CONTEXT)
    drafter, parts = built(folder), VerifierParts(folder)
    write_sglang(drafter, tmp_path / "sglang", torch.float32)
    teacher = Teacher.read(parts, drafter.t2d_V, "pre")
    write_speculators(drafter, tmp_path / "speculators", torch.float32, str(folder), teacher)
    config = tmp_path / package / "config.json"
    config.write_text(
        config.read_text().replace(f'"max_position_embeddings": {CONTEXT}', '"max_position_embeddings": 2048')
    )

    with pytest.raises(ExportMismatch, match=f"{package}/ says a context of 2048 tokens, .* {CONTEXT}"):
        require_same(drafter, torch.float32, tmp_path / "sglang", tmp_path / "speculators", parts)


def test_later_steps_of_the_exported_speculators_model_are_its_own_chain(tmp_path: Path) -> None:
    folder = tiny_verifier(tmp_path / "verifier")
    drafter, parts = built(folder), VerifierParts(folder)
    write_speculators(drafter, tmp_path / "out", torch.float32, str(folder), Teacher.read(parts, drafter.t2d_V, "pre"))
    aux, ids = probe(drafter)

    steps = speculators_logits(load_speculators(tmp_path / "out", folder), 3, aux, ids)

    assert len(steps) == 3
    assert all(step.shape == (len(ids), DRAFT) for step in steps)
    assert not torch.allclose(steps[0], steps[1], atol=1e-3)
