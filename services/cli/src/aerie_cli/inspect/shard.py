"""`aerie inspect shard`: what was captured, and which of its text the drafter is trained on.

In the decoded supervised spans a wrong mask or a wrong template shows at a glance. The shard is also checked against its own
layout (by the rule that training applies), its manifest, and the capture contract.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url, job_path
from aerie_cli.exits import FAILED, OK
from aerie_cli.inspect.tensors import NotTensors, Tensors
from aerie_cli.output import Json, aside, command, document, people, plain, value_text
from eagle3_core.data.sources import path_of
from eagle3_core.errors import AerieError, InvalidRequest
from eagle3_core.objects.manifest import FileEntry, Manifest, damage
from eagle3_core.objects.protocol import ObjectDamaged
from eagle3_core.shards.layout import (
    INDEX_DTYPES,
    Index,
    ShardHeader,
    UnknownCodec,
    fault,
    index_fault,
    read_header,
    states_fault,
)
from eagle3_core.shards.manifest import ShardCounts, ShardDamaged, contract_of, shard_entries
from eagle3_core.strict_json import parse_model
from eagle3_core.verifier import identity
from eagle3_core.verifier.contract import CaptureContract

Place = Annotated[Path, typer.Argument(metavar="PATH", help="A shard, or a manifest that lists shards.")]
Verifier = Annotated[
    Path | None,
    typer.Option("--verifier", help="Folder of the verifier, for its tokenizer. Default: the one of the shard's job."),
]
Samples = Annotated[int, typer.Option("--samples", min=0, help="Samples to show in words.")]


@dataclass(frozen=True)
class Found:
    """A shard's file, and what a manifest says of it where there is one."""

    path: Path
    entry: FileEntry | None = None
    counts: ShardCounts | None = None
    contract: CaptureContract | None = None


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
    shards = find(place)
    contract = shards[0].contract
    tokenizer, warning = find_tokenizer(contract, place, verifier, url, folder)
    facts = [describe(found, tokenizer, samples) for found in shards]
    bad = sum(fact["not_finite"] for fact in facts)
    stated = contract.model_dump(mode="json") if contract is not None else None
    if as_json:
        document({"shards": facts, "contract": stated, "not_finite": bad, "warning": warning})
        return FAILED if bad else OK
    if warning:
        aside().print(Text(plain(f"warning: {warning}"), style="yellow"))
    for fact in plain(facts):
        _print(fact)
    if stated is not None:
        table = Table(title="capture contract", title_justify="left", box=None, pad_edge=False, show_header=False)
        for name, value in plain(stated).items():
            table.add_row(name, escape(value_text(value)))
        people().print(table)
    return FAILED if bad else OK


def find(place: Path) -> list[Found]:
    """The shards that `place` names: it is one (its manifest may lie beside it), or a manifest. At least one.

    Raises InvalidRequest, ShardDamaged.
    """
    if place.suffix == ".json":
        manifest = _manifest(place)
        entries = shard_entries(manifest)
        if not entries:
            raise InvalidRequest(f"{place} lists no shard", remedy="name a manifest of `extract`")
        root, contract = _store_root(place, manifest), contract_of(manifest)
        return [Found(root / entry.key, entry, counts, contract) for entry, counts in entries]
    if not place.is_file():
        raise NotTensors(f"{place} is no file", remedy="name a shard, or a manifest that lists shards")
    for beside in sorted(place.absolute().parent.glob("*-manifest.json")):
        for entry, counts in _entries_beside(beside):
            if entry.key.endswith(f"/{place.name}"):
                return [Found(place, entry, counts, contract_of(_manifest(beside)))]
    return [Found(place)]


def _entries_beside(path: Path) -> list[tuple[FileEntry, ShardCounts]]:
    """The shards that a manifest found beside a shard lists; another stage's, or a damaged one, says nothing of it."""
    try:
        return shard_entries(_manifest(path))
    except AerieError:
        return []


def _manifest(path: Path) -> Manifest:
    try:
        if not path.is_file():
            raise ValueError("it is no file")
        return parse_model(Manifest, path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"{path} is no manifest: {error}", remedy="name a manifest that the object store holds"
        ) from None


def _store_root(path: Path, manifest: Manifest) -> Path:
    """The folder that the manifest's keys start from."""
    for root in path.absolute().parents:
        if any((root / entry.key).is_file() for entry in manifest.files):
            return root
    raise InvalidRequest(
        f"the objects that {path} lists are not above it", remedy="name the manifest inside its object store"
    )


def find_tokenizer(
    contract: CaptureContract | None, place: Path, verifier: Path | None, url: str | None, folder: Path
) -> tuple[Tokenizer | None, str]:
    """The tokenizer that made the tokens, and a warning where it is not surely the one (or is not to be found)."""
    from eagle3_core.data.templates import load_tokenizer

    try:
        home = verifier or _verifier_of_job(place, url, folder)
        known, tokenizer = identity.inspect(home), load_tokenizer(home)
    except AerieError as error:
        return None, f"tokens are shown as numbers: {error.detail} (give --verifier)"
    if contract is not None and contract.tokenizer_digest != known.tokenizer_digest:
        wanted, have = contract.tokenizer_digest[:16], known.tokenizer_digest[:16]
        return tokenizer, f"the states were captured with tokenizer {wanted}, {home} has {have}"
    return tokenizer, ""


def _verifier_of_job(place: Path, url: str | None, folder: Path) -> Path:
    """The verifier's folder, by asking the API for the job whose id is in the object's path."""
    job_id = next((part for part in place.absolute().parts if part.startswith("job_")), None)
    if job_id is None:
        raise InvalidRequest(
            f"{place} does not say which job it is of",
            remedy="name the file inside its object store, or give the verifier's folder with --verifier",
        )
    with Api.found(url, folder) as api:
        model = str(api.get(job_path(job_id))["spec"]["verifier"]["model"])
    return path_of(model)


def describe(found: Found, tokenizer: Tokenizer | None, samples: int) -> dict[str, Any]:
    """Counts, state tensors, non-finite elements and the first `samples` samples of a shard.

    Raises NotTensors, ShardDamaged, ObjectDamaged, UnknownCodec, each naming the file.
    """
    _held_against_manifest(found)
    tensors = Tensors(found.path)
    if missing := [name for name in INDEX_DTYPES if name not in tensors.entries]:
        raise NotTensors(
            f"{found.path} is no shard: it has no {', '.join(missing)}", remedy="name a shard that `extract` wrote"
        )
    header, index = whole(found, tensors)
    states = {name: entry for name, entry in tensors.entries.items() if name not in INDEX_DTYPES}
    count = len(index.sample_offsets) - 1
    return {
        "file": str(found.path),
        "bytes": found.path.stat().st_size,
        "codec": header.codec,
        "samples": count,
        "tokens": len(index.input_ids),
        "supervised_tokens": index.supervised_tokens,
        "final_states": len(index.final_index),
        "states": {name: {"dtype": entry.dtype, "shape": list(entry.shape)} for name, entry in states.items()},
        "not_finite": sum(tensors.scan(name).not_finite for name in states),
        "first": [_sample(i, index, header, tokenizer) for i in range(min(samples, count))],
    }


def _held_against_manifest(found: Found) -> None:
    if found.entry is None:
        return
    fault = damage(found.path, found.entry) if found.path.is_file() else "is not there, and its manifest lists it"
    if fault:
        raise ObjectDamaged(f"{found.path} {fault}", remedy="delete the object and retry the job from `extract`")


def whole(found: Found, tensors: Tensors) -> tuple[ShardHeader, Index]:
    """Header and small tensors of a shard that fits together. Raises ShardDamaged, UnknownCodec."""
    contract = found.contract
    try:
        header = read_header(tensors.metadata)
        if header.codec != "raw":
            raise UnknownCodec(
                f"{found.path}: codec {header.codec!r} cannot be looked into", remedy="update this command"
            )
        for name in INDEX_DTYPES:
            entry = tensors.entries[name]
            if wrong := index_fault(name, entry.dtype, entry.shape):
                raise ValueError(wrong)
        index = Index(**{name: tensors.array(name) for name in INDEX_DTYPES})
        aux, final = tensors.entries["aux"], tensors.entries["final"]
        if (stored := {aux.dtype, final.dtype}) != {"BF16"}:
            raise ValueError(f"states are stored as {' and '.join(sorted(stored))}, codec raw stores BF16")
        vocab_size, hidden = (contract.vocab_size, contract.hidden_size) if contract is not None else (None, None)
        wrong = fault(header, index, found.counts, vocab_size) or states_fault(index, aux.shape, final.shape, hidden)
        if wrong:
            raise ValueError(wrong)
    except (ValueError, KeyError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ShardDamaged(
            f"{found.path} is no good shard: {reason}", remedy="run extract again", file=str(found.path)
        ) from None
    return header, index


def _sample(i: int, index: Index, header: ShardHeader, tokenizer: Tokenizer | None) -> dict[str, Any]:
    start, stop = int(index.sample_offsets[i]), int(index.sample_offsets[i + 1])
    ids, mask = index.input_ids[start:stop], index.loss_mask[start:stop]
    spans = [{"supervised": on, "tokens": len(run), "text": words(run, tokenizer)} for on, run in runs(ids, mask)]
    return {
        "index": i, "id": header.ids[i], "task": header.tasks[i], "tokens": stop - start,
        "supervised_tokens": int(mask.sum()), "spans": spans,
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
    console.print(f"[bold]{escape(fact['file'])}[/]")
    console.print(
        f"{fact['samples']} samples, {fact['tokens']} tokens, {fact['supervised_tokens']} supervised, "
        f"{fact['final_states']} final states kept, {fact['bytes']:,} bytes, codec {escape(fact['codec'])}"
    )
    for name, state in fact["states"].items():
        console.print(f"  {escape(name)} {state['dtype']} {escape(value_text(state['shape']))}")
    bad = fact["not_finite"]
    console.print(f"[red]{bad} elements are NaN or infinite[/]" if bad else "[green]all states are finite[/]")
    print_samples(fact["first"])


def print_samples(samples: Sequence[dict[str, Any]]) -> None:
    """Show samples in words, what is supervised of them in green."""
    console = people()
    for sample in samples:
        counts = f"{sample['tokens']} tokens, {sample['supervised_tokens']} supervised"
        console.print(Text(f"--- {sample['id']} ({sample['task']}): {counts}"))
        text = Text()
        for span in sample["spans"]:
            text.append(span["text"], style="bold green" if span["supervised"] else "dim")
        console.print(text)
