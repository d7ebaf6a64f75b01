"""`aerie inspect shard`: what was captured, and what of it the drafter is trained on, in words.

The decoded supervised spans are the one view in which a wrong mask or a wrong template shows at a glance.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from pydantic import ValidationError
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url
from aerie_cli.exits import FAILED, OK
from aerie_cli.inspect.tensors import NotTensors, read_tensors
from aerie_cli.output import Json, aside, command, document, people
from eagle3_core.errors import AerieError, InvalidRequest
from eagle3_core.objects.manifest import Manifest
from eagle3_core.verifier import identity

PLAIN = ("input_ids", "loss_mask", "sample_offsets", "final_index")

Place = Annotated[Path, typer.Argument(metavar="PATH", help="A shard, or a manifest that lists shards.")]
Verifier = Annotated[
    Path | None,
    typer.Option("--verifier", help="Folder of the verifier, for its tokenizer. Default: the one of the shard's job."),
]
Samples = Annotated[int, typer.Option("--samples", min=0, help="Samples to show in words.")]


@command
def shard(
    place: Place,
    verifier: Verifier = None,
    samples: Samples = 3,
    url: Url = None,
    folder: Dir = DEFAULT_DIR,
    as_json: Json = False,
) -> int:
    """Show counts, contract, NaN check and the decoded supervised spans of shards. Exit status 1 if a state is not finite."""
    manifest, shards = find(place)
    tokenizer, warning = find_tokenizer(manifest, place, verifier, url, folder)
    facts = [describe(path, tokenizer, samples) for path in shards]
    bad = sum(fact["not_finite"] for fact in facts)
    if as_json:
        contract = manifest.contract if manifest is not None else None
        document({"shards": facts, "contract": contract, "not_finite": bad, "warning": warning})
        return FAILED if bad else OK
    if warning:
        aside().print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    for fact in facts:
        _print(fact)
    if manifest is not None and manifest.contract is not None:
        table = Table(title="capture contract", title_justify="left", box=None, pad_edge=False, show_header=False)
        for name, value in manifest.contract.items():
            table.add_row(name, escape(str(value)))
        people().print(table)
    return FAILED if bad else OK


def find(place: Path) -> tuple[Manifest | None, list[Path]]:
    """The manifest and the shards that `place` names: it is a shard (its manifest may lie beside it) or a manifest."""
    if place.suffix == ".json":
        manifest = _manifest(place)
        root = _store_root(place, manifest)
        found = [root / entry.key for entry in manifest.files if entry.name.startswith("shard-")]
        if not found:
            raise InvalidRequest(f"{place} lists no shard", remedy="name a manifest of `extract`")
        return manifest, found
    for beside in sorted(place.parent.glob("*-manifest.json")):
        manifest = _manifest(beside)
        if any(entry.key.endswith(f"/{place.name}") for entry in manifest.files):
            return manifest, [place]
    return None, [place]


def _manifest(path: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise InvalidRequest(
            f"{path} is no manifest: {error}", remedy="name a manifest that the object store holds"
        ) from None


def _store_root(path: Path, manifest: Manifest) -> Path:
    """The folder that the manifest's keys start from."""
    for root in path.absolute().parents:
        if manifest.files and (root / manifest.files[0].key).is_file():
            return root
    raise InvalidRequest(
        f"the objects that {path} lists are not above it", remedy="name the manifest inside its object store"
    )


def find_tokenizer(
    manifest: Manifest | None, place: Path, verifier: Path | None, url: str | None, folder: Path
) -> tuple[Tokenizer | None, str]:
    """The tokenizer that made the tokens, and a warning where it is not surely the one (or is not to be found)."""
    from tokenizers import Tokenizer

    try:
        home = verifier or _verifier_of_job(place, url, folder)
        known = identity.inspect(home)
    except AerieError as error:
        return None, f"tokens are shown as numbers: {error.detail} (give --verifier)"
    tokenizer = Tokenizer.from_file(str(home / "tokenizer.json"))
    wanted = (manifest.contract or {}).get("tokenizer_digest") if manifest is not None else None
    if wanted not in (None, known.tokenizer_digest):
        return (
            tokenizer,
            f"the states were captured with tokenizer {wanted[:16]}, {home} has {known.tokenizer_digest[:16]}",
        )
    return tokenizer, ""


def _verifier_of_job(place: Path, url: str | None, folder: Path) -> Path:
    """The verifier's folder, by asking the API for the job whose id is in the object's path."""
    parts = place.absolute().parts
    job_id = next((part for part in parts if part.startswith("job_")), None)
    if job_id is None:
        raise InvalidRequest(f"{place} does not say which job it is of")
    with Api.found(url, folder) as api:
        model = str(api.get(f"/jobs/{job_id}")["spec"]["verifier"]["model"])
    return Path(model.removeprefix("file://"))


def describe(path: Path, tokenizer: Tokenizer | None, samples: int) -> dict[str, Any]:
    """Counts, state tensors, non-finite elements and the first `samples` samples of the shard at `path`."""
    tensors, metadata = read_tensors(path)
    if missing := [name for name in PLAIN if name not in tensors]:
        raise NotTensors(
            f"{path} is no shard: it has no {', '.join(missing)}", remedy="name a shard that `extract` wrote"
        )
    ids, mask, offsets = (tensors[name].array for name in PLAIN[:3])
    header = json.loads(metadata.get("shard", "{}"))
    states = {name: tensor for name, tensor in tensors.items() if name not in PLAIN}
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "codec": header.get("codec"),
        "samples": len(offsets) - 1,
        "tokens": len(ids),
        "supervised_tokens": int(mask.sum()),
        "final_states": len(tensors["final_index"].array),
        "states": {name: {"dtype": t.dtype, "shape": list(t.array.shape)} for name, t in states.items()},
        "not_finite": sum(tensor.not_finite() for tensor in states.values()),
        "first": [_sample(i, ids, mask, offsets, header, tokenizer) for i in range(min(samples, len(offsets) - 1))],
    }


def _sample(
    i: int,
    ids: NDArray[Any],
    mask: NDArray[Any],
    offsets: NDArray[Any],
    header: dict[str, Any],
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    start, stop = int(offsets[i]), int(offsets[i + 1])
    spans = [
        {"supervised": on, "tokens": len(run), "text": words(run, tokenizer)}
        for on, run in runs(ids[start:stop], mask[start:stop])
    ]
    names, tasks = header.get("ids") or [], header.get("tasks") or []
    return {
        "index": i, "id": names[i] if i < len(names) else None, "task": tasks[i] if i < len(tasks) else None,
        "tokens": stop - start, "supervised_tokens": int(mask[start:stop].sum()), "spans": spans,
    }  # fmt: skip


def runs(ids: NDArray[Any], mask: NDArray[Any]) -> Iterator[tuple[bool, NDArray[Any]]]:
    """Stretches of equal mask: (supervised, token ids)."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
    for piece, on in zip(np.split(ids, edges), np.split(mask, edges), strict=True):
        if len(piece):
            yield bool(on[0]), piece


def words(ids: NDArray[Any], tokenizer: Tokenizer | None) -> str:
    """`ids` as text, special tokens included; as numbers without a tokenizer."""
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False) if tokenizer else " ".join(map(str, ids.tolist()))


def _print(fact: dict[str, Any]) -> None:
    console = people()
    console.print(f"[bold]{escape(fact['file'])}[/]", soft_wrap=True)
    console.print(
        f"{fact['samples']} samples, {fact['tokens']} tokens, {fact['supervised_tokens']} supervised, "
        f"{fact['final_states']} final states kept, {fact['bytes']:,} bytes, codec {fact['codec']}"
    )
    for name, state in fact["states"].items():
        console.print(f"  {name} {state['dtype']} {escape(str(state['shape']))}")
    verdict = (
        "[green]all states are finite[/]"
        if not fact["not_finite"]
        else f"[red]{fact['not_finite']} elements are NaN or infinite[/]"
    )
    console.print(verdict)
    for sample in fact["first"]:
        console.print(
            Text(
                f"--- {sample['id']} ({sample['task']}): {sample['tokens']} tokens, {sample['supervised_tokens']} supervised"
            )
        )
        text = Text()
        for span in sample["spans"]:
            text.append(span["text"], style="bold green" if span["supervised"] else "dim")
        console.print(text, soft_wrap=True)
