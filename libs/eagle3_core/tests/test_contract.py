"""The capture contract: what must be the same, what may differ and is said, and nothing between the two."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3_core.verifier.contract import (
    MAY_DIFFER,
    MUST_MATCH,
    CaptureContract,
    ContractMismatch,
    agree,
    differences,
)

LABELS = {"schema_version", "verifier_name"}
"""Fields that say nothing about the states."""


def contract(**changes: Any) -> CaptureContract:
    return CaptureContract(
        **{
            "verifier": "a" * 64, "verifier_name": "tiny", "revision": "local", "config_digest": "c", "tokenizer_digest": "t",
            "chat_template_digest": "j", "hidden_size": 8, "num_layers": 9, "vocab_size": 32, "aux_layers": (2, 4, 6),
            "dtype": "bfloat16", "stored_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "attention": "sdpa",
            "engine": "transformers", "engine_version": "5.0", "capture_pass": "prefill", **changes,
        }
    )  # fmt: skip


def test_every_field_must_match_or_may_differ_or_is_a_label():
    assert sorted([*MUST_MATCH, *MAY_DIFFER, *LABELS]) == sorted(CaptureContract.model_fields)


@pytest.mark.parametrize(
    ("field", "other"),
    [("dtype", "float16"), ("stored_dtype", "float32"), ("kv_cache_dtype", "fp8_e5m2"), ("quantization", "fp8"),
     ("aux_layers", (1, 4, 6)), ("final", "post"), ("revision", "main")],
)  # fmt: skip
def test_states_of_what_is_another_verifier_to_a_drafter_are_refused_with_both_sides(field, other):
    sides = [("extract unit 0", contract()), ("extract unit 1", contract(**{field: other}))]

    with pytest.raises(ContractMismatch) as refused:
        agree(sides)

    assert f"extract unit 0 has {field}=" in refused.value.detail
    assert f"extract unit 1 has {field}={other!r}" in refused.value.detail


def test_another_engine_is_no_other_verifier_and_is_said_once_with_where():
    old, new = contract(), contract(engine_version="6.0", attention="eager")
    sides = [("unit 0", old), ("unit 1", new), ("unit 2", new)]

    shared, said = agree(sides), differences(sides)

    assert shared == old
    assert said == [
        "the hidden states differ in engine_version: 5.0 (unit 0), 6.0 (unit 1)",
        "the hidden states differ in attention: sdpa (unit 0), eager (unit 1)",
    ]


def test_another_plug_in_is_said_and_none_at_all_is_not():
    old, new, none = (contract(plugin_version=version) for version in ("0.1.0", "0.2.0", None))

    assert differences([("a", old), ("b", none), ("c", new)]) == [
        "the hidden states differ in plugin_version: 0.1.0 (a), 0.2.0 (c)"
    ]
    assert differences([("a", old), ("b", none)]) == []


def test_what_is_the_same_is_not_said():
    assert differences([("a", contract()), ("b", contract(verifier_name="elsewhere"))]) == []
