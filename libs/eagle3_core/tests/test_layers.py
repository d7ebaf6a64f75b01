"""One table of layer numbers. The oracle adds 10^l in layer l, so a captured value shows at a glance which layer was read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.verifier.layers import (
    LayerChoice,
    default_layers,
    from_engine,
    resolve_layers,
    sglang_engine,
    to_engine,
)


def residual_entering(layer: int) -> int:
    return sum(10**below for below in range(layer))


def engine_capture(ids: tuple[int, ...], engine: str) -> list[int]:
    """What each engine's own rule captures, written out from the engines' sources, independent of the table."""
    if engine == "sglang-llama":
        inputs = [i + 1 for i in ids]
    elif engine == "sglang-deepseek":
        inputs = [i + 1 for i in ids] if ids[0] == 1 else list(ids)
    else:
        inputs = list(ids)
    return [residual_entering(i) for i in inputs]


@pytest.mark.parametrize("engine", ["huggingface", "vllm", "sglang-llama", "sglang-deepseek"])
@pytest.mark.parametrize("layers", [(2, 30, 58), (3, 31, 59), (2, 15, 27)])
def test_every_engine_reads_the_layers_that_the_contract_names(engine: str, layers: tuple[int, int, int]):
    ids = to_engine(layers, engine)

    assert engine_capture(ids, engine) == [residual_entering(i) for i in layers]


def test_kimi_and_llama_get_the_published_numbers():
    assert default_layers(61) == (2, 30, 58)
    assert to_engine((2, 30, 58), "sglang-deepseek") == (1, 29, 57)
    assert to_engine((2, 30, 58), "sglang-llama") == (1, 29, 57)
    assert to_engine((2, 30, 58), "vllm") == (2, 30, 58)


@given(
    st.lists(st.integers(0, 80), min_size=3, max_size=3, unique=True).map(sorted).map(tuple),
    st.sampled_from(["sglang-llama", "sglang-deepseek"]),
)
def test_translation_is_exact_or_refused(layers: tuple[int, int, int], engine: str):
    try:
        ids = to_engine(layers, engine)
    except LayerChoice:
        return
    assert from_engine(ids, engine) == layers


@pytest.mark.parametrize(
    ("requested", "num_layers", "says"),
    [
        (None, 6, "no default aux layers"),
        (None, 2, "three"),
        ((1, 2, 9), 8, "0..7"),
        ((3, 2, 1), 8, "increasing"),
        ((1, 2), 8, "three"),
    ],
)
def test_layers_that_do_not_exist_are_refused_with_a_remedy(
    requested: tuple[int, ...] | None, num_layers: int, says: str
):
    with pytest.raises(LayerChoice, match=says) as caught:
        resolve_layers(requested, num_layers)

    assert caught.value.remedy


def test_a_verifier_type_decides_the_rule():
    assert sglang_engine("kimi_k25") == "sglang-deepseek"
    assert sglang_engine("qwen3") == "sglang-llama"
