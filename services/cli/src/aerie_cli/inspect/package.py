"""A folder that holds a drafter, and everything that can be wrong with it.

A loader that does not know a tensor's name ignores the tensor, and one that misses a tensor may fill it at random: such a
drafter serves without an error, with an acceptance length of 1. So every tensor is compared with what the config promises,
the packages of one drafter with each other, and both with the capture contract.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from aerie_cli.inspect.tensors import Scan, Tensors
from eagle3_core import strict_json
from eagle3_core.drafter.tensors import LAYER, SGLANG_LAYER, tensor_shapes
from eagle3_core.errors import AerieError
from eagle3_core.faults import placed
from eagle3_core.tensor_table import Entry
from eagle3_core.verifier.contract import CaptureContract

SHOWN = (
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "num_hidden_layers", "vocab_size", "draft_vocab_size", "max_position_embeddings", "rope_theta", "eagle_config",
    "eagle_aux_hidden_state_layer_ids", "dtype", "torch_dtype", "norm_output", "fc_norm", "speculators_model_type",
)  # fmt: skip
SGLANG_ARCHITECTURE = "LlamaForCausalLMEagle3"
MAPS = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8")}
"""Dtypes of the two maps between the vocabularies."""
FLOATS = ("F32", "F16", "BF16")
LARGEST_CONFIG = 16 << 20

Size = Annotated[int, Field(gt=0, lt=1 << 31, strict=True)]


class NoConfig(AerieError):
    """A drafter's config.json or contract.json cannot be read."""

    code, status = "inspect.config", 422


class Stated(BaseModel):
    """What a drafter's config says of its shapes."""

    hidden_size: Size
    intermediate_size: Size
    num_heads: Size = Field(alias="num_attention_heads")
    num_kv_heads: Size = Field(alias="num_key_value_heads")
    head_dim: Size
    vocab_size: Size
    draft_vocab_size: Size
    fc_norm: bool = Field(False, strict=True)


@dataclass(frozen=True)
class Package:
    """One folder that holds a drafter."""

    folder: Path
    config: Mapping[str, Any]
    """The config, with what is nested under `transformer_layer_config` brought to the top."""
    entries: Mapping[str, Entry]
    scans: Mapping[str, Scan]
    faults: list[str]

    @property
    def speculators(self) -> bool:
        """Whether it is speculators' kind, not SGLang's."""
        return "speculators_model_type" in self.config

    def common(self) -> dict[str, Scan]:
        """Its tensors under the names that both kinds share."""
        return {name.replace(SGLANG_LAYER, LAYER): scan for name, scan in self.scans.items()}

    def shown(self) -> dict[str, Any]:
        """As it is printed."""
        return {
            "folder": str(self.folder),
            "config": {name: self.config[name] for name in SHOWN if name in self.config},
            "tensors": {name: {"dtype": e.dtype, "shape": list(e.shape)} for name, e in self.entries.items()},
            "parameters": sum(math.prod(e.shape) for e in self.entries.values() if e.dtype in FLOATS),
            "faults": self.faults,
        }


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises NoConfig."""
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise ValueError(f"it has more than {LARGEST_CONFIG} bytes")
        return strict_json.loads_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise NoConfig(f"{path} cannot be read: {error}", remedy="download the drafter again") from None


def describe(folder: Path) -> Package:
    """The drafter in `folder` and what is wrong with it in itself. Raises NoConfig, NotTensors."""
    config = read_json(folder / "config.json")
    nested = config.get("transformer_layer_config")
    flat = {**config, **nested} if isinstance(nested, dict) else config
    tensors = Tensors(folder / "model.safetensors")
    scans = {name: tensors.scan(name) for name in tensors.entries}
    package = Package(folder, flat, tensors.entries, scans, [])
    package.faults.extend(_faults(package, tensors))
    return package


def _faults(package: Package, tensors: Tensors) -> Iterator[str]:
    for name, scan in package.scans.items():
        if scan.not_finite:
            yield f"{name} holds {scan.not_finite} elements that are NaN or infinite"
    stated, lack = _stated(package)
    if stated is None:
        yield lack
    else:
        yield from shape_faults(package, stated)
    there = [name for name in MAPS if name in package.entries]
    odd = [name for name in there if len((e := package.entries[name]).shape) != 1 or e.dtype not in MAPS[name]]
    yield from (f"{name} is no map of tokens" for name in odd)
    if not odd:
        maps = {name: tensors.array(name) for name in there}
        sizes = (stated.draft_vocab_size, stated.vocab_size) if stated is not None else (None, None)
        yield from vocabulary_faults(maps.get("d2t"), maps.get("t2d"), *sizes)


def _stated(package: Package) -> tuple[Stated | None, str]:
    """The shapes that the config states, or what it lacks."""
    config = {name: value for name, value in package.config.items() if value is not None}
    if not package.speculators and config.get("architectures") != [SGLANG_ARCHITECTURE]:
        return None, f"config.json describes no EAGLE-3 drafter: architectures is {config.get('architectures')!r:.200}"
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    config.setdefault("num_key_value_heads", heads)
    config.setdefault("draft_vocab_size", config.get("vocab_size"))
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        config.setdefault("head_dim", hidden // heads)
    try:
        return Stated.model_validate(config), ""
    except ValidationError as error:
        first = error.errors()[0]
        return None, f"config.json: {placed(first)}"


def shape_faults(package: Package, stated: Stated) -> Iterator[str]:
    """Tensors that are missing, of another shape than the config promises, or that the engine would drop."""
    prefix = LAYER if package.speculators else SGLANG_LAYER
    wanted: dict[str, tuple[int, ...]] = {n.replace(LAYER, prefix): s for n, s in tensor_shapes(stated).items()}
    if package.speculators:
        wanted["embed_tokens.weight"] = (stated.vocab_size, stated.hidden_size)
    for name, shape in wanted.items():
        if name not in package.entries:
            yield f"{name} is missing"
        elif package.entries[name].shape != shape:
            yield f"{name} is {list(package.entries[name].shape)}, the config promises {list(shape)}"
        elif package.entries[name].dtype not in FLOATS:
            yield f"{name} is stored as {package.entries[name].dtype}"
    if not package.speculators:
        yield from (
            f"SGLang drops {name} without a word" for name in package.entries if name not in wanted and name not in MAPS
        )


def vocabulary_faults(
    d2t: NDArray[Any] | None, t2d: NDArray[Any] | None, small: int | None, large: int | None
) -> list[str]:
    """What is wrong with the map from draft tokens to the verifier's: target of draft token i = i + d2t[i].

    `small`, `large`: sizes of the two vocabularies as the config states them, where it does.
    """
    if d2t is None:
        return [] if small == large else [f"draft_vocab_size is {small}, vocab_size {large}, and there is no d2t"]
    faults: list[str] = []
    if small is not None and small != len(d2t):
        faults.append(f"d2t has {len(d2t)} entries, draft_vocab_size is {small}")
    end = large if large is not None else 1 << 31
    if len(d2t) and (int(d2t.min()) < 0 or int(d2t.max()) >= end):
        return [*faults, f"d2t holds offsets {d2t.min()}..{d2t.max()}, vocab_size is {large}: is it a list of tokens?"]
    targets = np.arange(len(d2t)) + d2t
    if len(targets) and targets.max() >= end:
        faults.append(f"d2t leads to tokens {targets.min()}..{targets.max()}, vocab_size is {large}")
    if (np.diff(targets) <= 0).any():
        faults.append("d2t leads two draft tokens to one token, or is not in order: are these offsets?")
    if t2d is not None and large is not None and len(t2d) != large:
        faults.append(f"t2d has {len(t2d)} entries, vocab_size is {large}")
    if t2d is not None and not faults and not np.array_equal(np.flatnonzero(t2d), targets):
        faults.append(
            f"t2d marks {np.count_nonzero(t2d)} tokens, d2t leads to {len(targets)}, and they are not the same"
        )
    return faults


def contract_faults(config: Mapping[str, Any], contract: CaptureContract | None) -> Iterator[str]:
    """Where config and capture contract disagree. Layers are compared where both count alike (speculators' are ours)."""
    if contract is None:
        return
    stated: dict[str, Any] = {name: config.get(name) for name in ("hidden_size", "vocab_size")}
    promised: dict[str, Any] = {name: getattr(contract, name) for name in stated}
    if "speculators_model_type" in config:
        stated["aux_layers"] = config.get("eagle_aux_hidden_state_layer_ids")
        promised["aux_layers"] = list(contract.aux_layers)
    for name, value in stated.items():
        if value != promised[name]:
            yield f"config.json has {name} {value!r:.80}, the capture contract {promised[name]!r:.80}"


def differences(packages: Sequence[Package]) -> list[str]:
    """Tensors that the packages of one drafter share and that are not the same."""
    faults: list[str] = []
    for one, other in pairwise(packages):
        first, second = one.common(), other.common()
        faults += [
            f"{one.folder.name}/ and {other.folder.name}/ hold different {name}"
            for name in first.keys() & second.keys()
            if first[name].digest != second[name].digest
        ]
    return sorted(faults)
