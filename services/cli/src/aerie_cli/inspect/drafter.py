"""`aerie inspect drafter`: whether a packaged drafter is whole, and for which verifier it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from aerie_cli.exits import FAILED, OK
from aerie_cli.inspect.tensors import Stored, read_tensors
from aerie_cli.output import Json, command, document, people
from eagle3_core.errors import InvalidRequest

SHOWN = (
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "num_hidden_layers", "vocab_size", "draft_vocab_size", "max_position_embeddings", "rope_theta", "eagle_config",
    "eagle_aux_hidden_state_layer_ids", "dtype", "torch_dtype", "norm_output", "fc_norm", "speculators_model_type",
)  # fmt: skip

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A drafter's folder: sglang/, speculators/, or the one above them.")
]


@command
def drafter(folder: Folder, as_json: Json = False) -> int:
    """Show config, tensors, draft vocabulary and capture contract of a drafter. Exit status 1 if something is wrong with it."""
    packages = [describe(place) for place in places(folder)]
    contract = read_contract(folder)
    faults = [fault for package in packages for fault in package["faults"]]
    if as_json:
        document({"packages": packages, "contract": contract, "faults": faults})
        return FAILED if faults else OK
    for package in packages:
        _print(package)
    if contract:
        table = Table(title="capture contract", title_justify="left", box=None, pad_edge=False, show_header=False)
        for name, value in contract.items():
            table.add_row(name, escape(str(value)))
        people().print(table)
    return FAILED if faults else OK


def places(folder: Path) -> list[Path]:
    """The folders of `folder` that hold a drafter. Raises InvalidRequest where there is none."""
    found = [p for p in (folder, folder / "sglang", folder / "speculators") if (p / "config.json").is_file()]
    if not found:
        raise InvalidRequest(
            f"{folder} holds no drafter: no config.json in it, in sglang/ or in speculators/",
            remedy="name the folder that `aerie demo` or a download of a job's artifacts made",
        )
    return found


def read_contract(folder: Path) -> dict[str, Any] | None:
    """The capture contract that was packaged with the drafter, if it is there."""
    for place in (folder / "contract.json", folder.parent / "contract.json"):
        if place.is_file():
            return json.loads(place.read_text())
    return None


def describe(folder: Path) -> dict[str, Any]:
    """Config, tensors and faults of the drafter in `folder`."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise InvalidRequest(
            f"{folder}/config.json is not JSON: {error}", remedy="download the drafter again"
        ) from None
    tensors, _ = read_tensors(folder / "model.safetensors")
    flat = {**config, **(config.get("transformer_layer_config") or {})}
    return {
        "folder": str(folder),
        "config": {name: flat[name] for name in SHOWN if name in flat},
        "tensors": {name: {"dtype": t.dtype, "shape": list(t.array.shape)} for name, t in tensors.items()},
        "parameters": sum(int(t.array.size) for t in tensors.values() if t.dtype in ("F32", "F16", "BF16")),
        "faults": [*_not_finite(tensors), *vocabulary_faults(tensors, flat)],
    }


def _not_finite(tensors: dict[str, Stored]) -> list[str]:
    return [
        f"{name} holds {bad} elements that are NaN or infinite"
        for name, t in tensors.items()
        if (bad := t.not_finite())
    ]


def vocabulary_faults(tensors: dict[str, Stored], config: dict[str, Any]) -> list[str]:
    """What is wrong with the map from draft tokens to the verifier's: target of draft token i = i + d2t[i]."""
    if "d2t" not in tensors:
        small, large = config.get("draft_vocab_size"), config.get("vocab_size")
        return (
            [] if small in (None, large) else [f"draft_vocab_size is {small}, vocab_size {large}, and there is no d2t"]
        )
    d2t = tensors["d2t"].array.astype(np.int64).reshape(-1)
    targets = np.arange(len(d2t)) + d2t
    faults = []
    if (said := config.get("draft_vocab_size")) not in (None, len(d2t)):
        faults.append(f"d2t has {len(d2t)} entries, draft_vocab_size is {said}")
    if len(targets) and (targets.min() < 0 or targets.max() >= config.get("vocab_size", np.inf)):
        faults.append(f"d2t leads to tokens {targets.min()}..{targets.max()}, vocab_size is {config.get('vocab_size')}")
    if (np.diff(targets) <= 0).any():
        faults.append("d2t leads two draft tokens to one token, or is not in order: are these offsets?")
    if "t2d" in tensors and not faults:
        marked = np.flatnonzero(tensors["t2d"].array.reshape(-1))
        if not np.array_equal(marked, targets):
            faults.append(f"t2d marks {len(marked)} tokens, d2t leads to {len(targets)}, and they are not the same")
    return faults


def _print(package: dict[str, Any]) -> None:
    console = people()
    console.print(f"[bold]{escape(package['folder'])}[/], {package['parameters']:,} parameters", soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in package["config"].items():
        table.add_row(name, escape(str(value)))
    console.print(table)
    table = Table(box=None, pad_edge=False)
    for name in ("tensor", "dtype", "shape"):
        table.add_column(name)
    for name, tensor in package["tensors"].items():
        table.add_row(escape(name), tensor["dtype"], escape(str(tensor["shape"])))
    console.print(table)
    for fault in package["faults"]:
        console.print(Text(f"wrong: {fault}", style="red"), soft_wrap=True)
    if not package["faults"]:
        console.print("[green]nothing wrong with it[/]")
