"""The one table of layer numbers.

Inside the house a captured layer is named by the layer whose *input* it is: number i = Hugging Face
`hidden_states[i]` = output of layer i - 1. Engines count differently (sglang 0.5.14 to 0.5.23, read in source and
measured): its Llama and Qwen models add 1 to the ids of a draft config, its DeepSeek and Kimi models add 1 only when
the first id is 1. `to_engine` gives the ids that make an engine read our layers, `from_engine` the reverse.
"""

from __future__ import annotations

from typing import Literal

from eagle3_core.errors import AerieError

Engine = Literal["huggingface", "vllm", "sglang-llama", "sglang-deepseek"]
MIN_LAYERS = 3
DEFAULT_MIN_LAYERS = 7
DEEPSEEK_FAMILY = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25")


class LayerChoice(AerieError):
    """The layers to capture do not exist in this verifier, or cannot be expressed in the engine."""

    code, status = "verifier.layers", 422


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """[2, N//2, N-3] of EAGLE-3 (paper's code, SafeAILab/EAGLE). Raises LayerChoice for N < 7, where they collide."""
    if num_layers < DEFAULT_MIN_LAYERS:
        raise LayerChoice(
            f"a verifier of {num_layers} layers has no default aux layers: [2, N//2, N-3] needs N >= {DEFAULT_MIN_LAYERS}",
            remedy="name three strictly increasing layers in extraction.aux_layers",
            pointer="/extraction/aux_layers",
        )
    return (2, num_layers // 2, num_layers - 3)


def resolve_layers(requested: tuple[int, ...] | None, num_layers: int) -> tuple[int, int, int]:
    """The layers to capture of a verifier of `num_layers`. Raises LayerChoice."""
    if num_layers < MIN_LAYERS:
        raise LayerChoice(
            f"the verifier has {num_layers} layers, EAGLE-3 reads three of them",
            remedy="use a verifier of at least three layers",
            pointer="/verifier/model",
        )
    if requested is None:
        return default_layers(num_layers)
    if len(requested) != 3 or list(requested) != sorted(set(requested)) or requested[-1] >= num_layers:
        raise LayerChoice(
            f"aux_layers {list(requested)} are not three strictly increasing layers of 0..{num_layers - 1}",
            remedy="an entry i means the input of layer i, as in Hugging Face's hidden_states[i]",
            pointer="/extraction/aux_layers",
        )
    return (requested[0], requested[1], requested[2])


def sglang_engine(verifier_model_type: str) -> Engine:
    """Which of sglang's two numbering rules applies to a verifier of this `model_type`."""
    return "sglang-deepseek" if verifier_model_type in DEEPSEEK_FAMILY else "sglang-llama"


def from_engine(ids: tuple[int, ...], engine: Engine) -> tuple[int, ...]:
    """Layer inputs that `engine` reads when its draft config says `ids`."""
    if engine == "sglang-llama" or (engine == "sglang-deepseek" and ids[0] == 1):
        return tuple(i + 1 for i in ids)
    return tuple(ids)


def to_engine(layers: tuple[int, ...], engine: Engine) -> tuple[int, ...]:
    """Ids to write for `engine` so that it reads the inputs of `layers`. Raises LayerChoice where none exist."""
    ids = layers
    if engine == "sglang-llama" or (engine == "sglang-deepseek" and layers[0] in (1, 2)):
        ids = tuple(i - 1 for i in layers)
    if min(ids) < 0 or from_engine(ids, engine) != tuple(layers):
        raise LayerChoice(
            f"{engine} cannot be told to read the inputs of layers {list(layers)}",
            remedy="choose aux_layers whose first entry is at least 2",
            pointer="/extraction/aux_layers",
        )
    return ids
