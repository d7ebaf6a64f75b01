"""Which layer is captured: a toy whose layer l adds 10^l shows it at a glance. And what the engine refuses to capture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    MistralConfig,
    MistralForCausalLM,
)

from eagle3_core.jobs.spec import VerifierSpec
from eagle3_core.testing import tiny_verifier
from eagle3_core.verifier.attention import attend
from eagle3_core.verifier.base import Decoding, SelfCheckFailed, StatesNotFinite
from eagle3_core.verifier.cache import Placement, placed
from eagle3_core.verifier.folder import UnsupportedVerifier, VerifierWeights
from eagle3_core.verifier.identity import inspect
from eagle3_core.verifier.layers import from_engine, to_engine
from eagle3_core.verifier.probe import Parts, Probe, find_parts, prove_norm
from eagle3_core.verifier.transformers import TransformersVerifier

torch.set_num_threads(1)  # tiny products: a second thread only waits, and waits long on a busy machine

N, H = 7, 4


class Adds(nn.Module):
    """Layer l: adds 10^l."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.amount = 10.0**layer

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.amount


class Halves(nn.Module):
    """A final norm that is easy to tell from its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * 0.5 * self.weight


class Toy(nn.Module):
    """Starts from zeros, so the state entering layer i is 11...1 with i ones."""

    def __init__(self, norms: int = 1, stacks: int = 1) -> None:
        super().__init__()
        for stack in range(stacks):
            self.add_module(f"layers{stack}", nn.ModuleList(Adds(layer) for layer in range(N)))
        for norm in range(norms):
            self.add_module(f"norm{norm}", Halves(H))
        self.head = nn.Linear(H, 3, bias=False)

    def get_decoder(self) -> nn.Module:
        return self if hasattr(self, "layers0") and not hasattr(self, "layers1") else nn.Identity()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: int) -> tuple[tuple[Tensor, ...], Tensor]:
        states = [torch.zeros(1, tokens, H)]
        for layer in self.layers0:
            states.append(layer(hidden_states=states[-1]))
        states[-1] = self.norm0(states[-1])
        return tuple(states), self.head(states[-1])


def ones(count: int) -> int:
    return int("1" * count) if count else 0


def probe_of(toy: Toy, layers: tuple[int, int, int]) -> Probe:
    probe = Probe(find_parts(toy, N, H), layers)
    probe.on = True
    return probe


def test_aux_i_is_the_input_of_layer_i_and_final_is_the_input_of_the_norm():
    toy = Toy()
    probe = probe_of(toy, (0, 3, 6))

    toy(2)

    states = probe.take()
    assert states.aux[0, 0, ::H].tolist() == [ones(0), ones(3), ones(6)]
    assert states.final[0, 0, 0] == ones(7)


@pytest.mark.parametrize("engine", ["huggingface", "vllm", "sglang-llama", "sglang-deepseek"])
@pytest.mark.parametrize("layers", [(2, 3, 4), (2, 3, 6), (3, 4, 5)])
def test_every_engine_told_by_the_table_reads_the_layers_that_we_capture(engine, layers):
    toy = Toy()
    ids = to_engine(layers, engine)
    reads = probe_of(toy, from_engine(ids, engine))  # what the engine captures when its config says `ids`

    toy(1)

    assert reads.take().aux[0, 0, ::H].tolist() == [ones(i) for i in layers]


def test_ids_passed_on_untranslated_read_one_layer_too_deep_in_a_llama_like_engine():
    toy = Toy()
    reads = probe_of(toy, from_engine((2, 3, 4), "sglang-llama"))

    toy(1)

    assert reads.take().aux[0, 0, ::H].tolist() == [ones(3), ones(4), ones(5)]


def test_the_proof_accepts_what_is_right():
    toy = Toy()
    probe = probe_of(toy, (1, 3, 5))

    probe.prove(*toy(3))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda states, logits: (states[1:], logits), "input of layer 1"),
        (lambda states, logits: ((*states[:-1], states[-1] * 2), logits), "not the input of the final norm"),
        (lambda states, logits: (states, logits * 1.5), "scaled or capped"),
    ],
)
def test_the_proof_names_what_differs(spoil, says):
    toy = Toy()
    probe = probe_of(toy, (1, 3, 5))

    with pytest.raises(SelfCheckFailed, match=says):
        probe.prove(*spoil(*toy(3)))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda states, logits: ((*states[:3], states[3] * torch.nan, *states[4:]), logits), r"hidden_states\[3\]"),
        (lambda states, logits: ((*states[:-1], states[-1] / 0), logits), r"hidden_states\[7\]"),
        (lambda states, logits: (states, logits * torch.nan), "logits"),
    ],
)
def test_values_that_are_no_numbers_are_named_as_such_and_not_as_a_fault_of_the_capture(spoil, says):
    toy = Toy()
    probe = probe_of(toy, (1, 3, 5))

    with pytest.raises(StatesNotFinite, match=f"over 3 tokens, {says} of the verifier is NaN .* at token 0") as refused:
        probe.prove(*spoil(*toy(3)))

    assert "bfloat16 or float32" in str(refused.value.remedy)


@pytest.mark.parametrize(
    ("tensor", "error", "says"),
    [
        ("model.norm.weight", VerifierWeights, "the final norm's gain is NaN or infinite"),
        ("model.layers.4.mlp.down_proj.weight", StatesNotFinite, r"hidden_states\[5\]"),
        ("lm_head.weight", StatesNotFinite, "logits"),
    ],
)
def test_a_checkpoint_with_a_nan_is_refused_for_it_when_it_is_loaded(tmp_path: Path, tensor, error, says):
    folder = tiny_verifier(tmp_path / "verifier")
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor].view(-1)[0] = torch.nan
    save_file(tensors, folder / "model.safetensors")

    with pytest.raises(error, match=says):
        TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype="float32", device="cpu"))


def test_a_checkpoint_of_zeros_is_told_from_an_attention_that_computes_otherwise(tmp_path: Path):
    folder = tiny_verifier(tmp_path / "verifier")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor * 0 for name, tensor in tensors.items()}, folder / "model.safetensors")

    with pytest.raises(SelfCheckFailed, match=r"every state that .* computes is zero"):
        TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype="float32", device="cpu"))


def test_a_layer_that_did_not_run_is_named():
    probe = probe_of(Toy(), (1, 3, 5))

    with pytest.raises(SelfCheckFailed, match="aux 1, aux 3, aux 5, final"):
        probe.take()


@pytest.mark.parametrize(
    ("shape", "says"), [({"stacks": 2}, "2 lists of 7"), ({"norms": 2}, "2 norms"), ({"norms": 0}, "0 norms")]
)
def test_a_model_without_one_clear_place_is_refused(shape, says):
    with pytest.raises(UnsupportedVerifier, match=says):
        find_parts(Toy(**shape), N, H)


def test_attention_sinks_are_refused_and_not_ignored():
    q, kv = torch.zeros(1, 2, 1, 4), torch.zeros(1, 1, 1, 4)

    with pytest.raises(UnsupportedVerifier, match="sinks"):
        attend(nn.Identity(), q, kv, kv, None, s_aux=torch.zeros(2))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_grouped_attention_equals_attention_with_repeated_heads(window, softcap):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 4, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    slots = torch.tensor([[2, 3, 4, 5], [5, 6, 7, 8]])

    with placed(Placement.of(slots)):
        have, _ = attend(nn.Identity(), query, key, value, None, scaling=0.3, sliding_window=window, softcap=softcap)

    scores = query @ key.repeat_interleave(3, 1).transpose(-1, -2) * 0.3
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    slot = torch.arange(9)
    seen = (slot <= slots[..., None]) & (slot > slots[..., None] - (window or 99))
    want = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ value.repeat_interleave(3, 1)
    torch.testing.assert_close(have, want.transpose(1, 2))


def test_long_passes_take_the_fused_kernel_with_the_same_result(monkeypatch):
    query, key = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    with placed(Placement.of(torch.arange(6)[None])):
        plain, _ = attend(nn.Identity(), query, key, key, None)
        monkeypatch.setattr("eagle3_core.verifier.attention.FUSED_FROM_SCORES", 1)
        fused, _ = attend(nn.Identity(), query, key, key, None)

    torch.testing.assert_close(fused, plain)


def test_a_sliding_window_is_kept_beyond_its_length(tmp_path: Path):
    folder = tiny_verifier(tmp_path / "verifier")
    config = MistralConfig(
        hidden_size=32, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=320, sliding_window=5, head_dim=8, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM._from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    prompt = list(range(20, 40))

    verifier = TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype="float32", device="cpu"))
    how = Decoding(max_new_tokens=8, batch_size=1, eos_ids=(), keep_states=True)
    (answer,) = verifier.generate([prompt], how, lambda *, done, tokens: None)

    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert answer.ids == ids[0].tolist()


TEXT = {
    "hidden_size": 32, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "vocab_size": 320, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = TEXT | MOE | {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4,
    "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3", TEXT | {"head_dim": 8}),
        ("qwen3_moe", TEXT | MOE | {"head_dim": 8, "num_experts": 4}),
        ("deepseek_v3", MLA),
        ("kimi_k25", {"text_config": MLA | {"model_type": "deepseek_v3"}, "vision_config": VISION}),
    ],
)
def test_other_families_nested_and_latent_attention_ones_included_answer_as_themselves(tmp_path: Path, kind, config):
    folder = tiny_verifier(tmp_path / "verifier")
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(kind, **config), attn_implementation="eager").eval()
    model.save_pretrained(folder)
    prompts = [[5, 6, 7, 40, 41], [5, 8]]

    verifier = TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype="float32", device="cpu"))
    how = Decoding(max_new_tokens=5, batch_size=2, eos_ids=(), keep_states=True)
    answers = {a.index: a.ids for a in verifier.generate(prompts, how, lambda *, done, tokens: None)}

    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(5):
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
        assert answers[i] == ids[0].tolist()


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path):
    folder = tiny_verifier(tmp_path / "verifier")
    whole = inspect(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(UnsupportedVerifier, match=r"lack 1 tensors.*model\.layers\.3\.mlp\.up_proj"):
        TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype="float32", device="cpu"), None, whole)


def test_the_contract_says_what_runs(tmp_path: Path):
    folder = tiny_verifier(tmp_path / "verifier")
    verifier = TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype="bfloat16", device="cpu"), (1, 2, 6))

    contract = verifier.contract("prefill")

    assert contract.verifier == verifier.identity.digest
    assert contract.aux_layers == (1, 2, 6)
    assert (contract.dtype, contract.stored_dtype, contract.final) == ("bfloat16", "bfloat16", "pre")
    assert (contract.engine, contract.attention, contract.capture_pass) == ("transformers", "slots", "prefill")


class OwnNorm(nn.Module):
    """A final norm of some kind, with a gain of 1."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((H,), 0.5))
        self.norm = norm

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.norm(hidden_states, self.weight)


def parts_with(norm) -> Parts:
    toy = Toy()
    toy.norm0 = OwnNorm(norm)
    return find_parts(toy, N, H)


def test_an_rms_norm_of_gain_w_is_what_the_teacher_computes():
    prove_norm(parts_with(lambda x, w: nn.functional.rms_norm(x, (H,), w, 1e-6)), 1e-6)


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w: nn.functional.layer_norm(x, (H,), w, None, 1e-6),
        lambda x, w: nn.functional.rms_norm(x, (H,), 1 + w, 1e-6),
        lambda x, w: nn.functional.rms_norm(x, (H,), w, 10.0),
        lambda x, w: x * float("nan"),
    ],
    ids=["a mean taken away", "a gain of 1 + w", "another epsilon", "no number"],
)
def test_any_other_final_norm_is_refused_instead_of_trained_on(norm):
    with pytest.raises(UnsupportedVerifier, match="no RMS norm of gain w") as caught:
        prove_norm(parts_with(norm), 1e-6)

    assert caught.value.pointer == "/verifier/model"


@pytest.mark.parametrize("fields", [{"hidden_act": "no such"}, {"rope_parameters": {"rope_type": "no such"}}])
def test_a_config_that_the_library_stumbles_over_is_the_verifiers_fault(tmp_path: Path, fields):
    folder = tiny_verifier(tmp_path / "verifier")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))

    with pytest.raises(UnsupportedVerifier, match="cannot load"):
        TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype="float32", device="cpu"))
