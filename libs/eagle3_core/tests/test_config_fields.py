"""A config.json that a library would stumble over is refused by its field when the job is posted."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_agreement import refused

from eagle3_core.jobs.spec import VerifierSpec
from eagle3_core.testing import tiny_verifier
from eagle3_core.verifier.fields import MAX_LABELS
from eagle3_core.verifier.folder import VerifierFault
from eagle3_core.verifier.identity import inspect
from eagle3_core.verifier.nulls import MORE, cannot_be_null


@pytest.fixture
def folder(tmp_path) -> Path:
    return tiny_verifier(tmp_path / "verifier")


def says(folder: Path, file: str = "config.json", **fields: Any) -> None:
    """Change fields of a JSON file; None is written as null."""
    place = folder / file
    place.write_text(json.dumps({**json.loads(place.read_text()), **fields}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_dropout", "x"), ("attention_dropout", True), ("sliding_window", "x"), ("pretraining_tp", []),
        ("pretraining_tp", 1.5), ("num_experts", -1), ("num_nextn_predict_layers", True), ("use_cache", "x"),
        ("attention_bias", 1), ("return_dict", 0), ("id2label", 5), ("id2label", {"a": "x"}), ("per_layer_config", [1]),
        ("text_config", []), ("attribute_map", 0), ("auto_map", True), ("base_model_tp_plan", "x"), ("sub_configs", -1),
        ("bos_token_id", [1, 2]), ("torch_dtype", "x"), ("dtype", "auto"), ("dtype", []), ("rope_parameters", 0),
        ("rope_parameters", []), ("rope_scaling", "linear"), ("rms_norm_eps", 1 << 33), ("initializer_range", 1.5),
        ("num_labels", 2.5), ("num_labels", MAX_LABELS + 1),
    ],
)  # fmt: skip
def test_a_field_that_the_library_would_stumble_over_is_refused_by_its_name(folder, field, value):
    says(folder, **{field: value})

    error = refused(folder)

    assert (error.code, field in error.detail) == ("verifier.config", True)


@pytest.mark.parametrize("field", ["mlp_bias", "attention_bias", "use_cache", "hidden_act", "tie_word_embeddings"])
def test_a_null_that_the_library_would_refuse_is_refused_by_its_name(folder, field):
    says(folder, **{field: None})

    error = refused(folder)

    assert (error.code, f"{field}=null" in error.detail) == ("verifier.config", True)


@pytest.mark.parametrize("field", ["head_dim", "rope_scaling", "sliding_window", "norm_topk_prob", "pretraining_tp"])
def test_a_null_that_the_library_takes_is_taken(folder, field):
    says(folder, **{field: None})

    assert inspect(folder).eos_token_ids == (2,)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(MORE))
def test_null_is_refused_in_the_fields_that_transformers_declares_without_it_and_in_no_others(kind):
    from huggingface_hub.errors import StrictDataclassError, StrictDataclassFieldValidationError
    from transformers import CONFIG_MAPPING

    def takes_null(name: str) -> bool:
        try:
            CONFIG_MAPPING[kind].from_dict({name: None})
        except StrictDataclassFieldValidationError:
            return False
        except (
            StrictDataclassError,
            ArithmeticError,
            TypeError,
            ValueError,
        ):  # null is declared, and this field alone makes no config
            return True
        return True

    names = [field.name for field in dataclasses.fields(CONFIG_MAPPING[kind]) if field.init]

    assert {name for name in names if not takes_null(name)} == cannot_be_null(kind)


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("quantised", [{"quant_method": "fp8"}, {}, 5])
def test_a_quantised_checkpoint_is_refused_while_nothing_runs_it(folder, field, quantised):
    says(folder, **{field: quantised})

    error = refused(folder)

    assert (error.code, field in error.detail) == ("verifier.unsupported", True)


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_weights_of_whole_numbers_without_a_word_of_their_scales_are_no_weights(folder, name):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = (tensors[name] * 100).astype(np.int8)
    save_file(tensors, folder / "model.safetensors")

    error = refused(folder)

    assert error.code == "verifier.unsupported"
    assert f"{name} as I8" in error.detail


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("config.json", {"return_dict": False}),
        ("config.json", {"torch_dtype": "float16", "dtype": None}),
        ("generation_config.json", {"cache_implementation": "x"}),
        ("generation_config.json", {"watermarking_config": 1}),
        ("generation_config.json", {"do_sample": False, "temperature": 0.3}),
    ],
)
def test_what_a_folder_says_of_how_to_call_the_model_changes_nothing(folder, file, fields):
    from eagle3_core.verifier.transformers import TransformersVerifier

    says(folder, file, **fields)

    verifier = TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype="float32", device="cpu"))

    assert verifier.identity.eos_token_ids == (2,)


def test_a_field_that_only_the_library_knows_is_said_with_its_file(folder):
    import torch

    from eagle3_core.verifier.transformers import load_model

    says(folder, mlp_bias=None)  # as if the list of nulls did not know it

    with pytest.raises(VerifierFault, match=r"config\.json: .*mlp_bias") as caught:
        load_model(folder, torch.float32, torch.device("cpu"))

    assert (caught.value.code, caught.value.pointer) == ("verifier.config", "/verifier/model")
