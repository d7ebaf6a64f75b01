"""`aerie inspect drafter`: whether a packaged drafter is whole, and for which verifier it was made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from aerie_cli.exits import FAILED, OK
from aerie_cli.inspect.package import NoConfig, contract_faults, describe, differences, read_json
from aerie_cli.output import Json, command, document, people, plain, value_text
from eagle3_core.errors import InvalidRequest
from eagle3_core.faults import placed
from eagle3_core.verifier.contract import CaptureContract

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A drafter's folder: sglang/, speculators/, or the one above them.")
]


@command
def drafter(folder: Folder, as_json: Json = False) -> int:
    """Show config, tensors, draft vocabulary and capture contract of a drafter. Exit status 1 if something is wrong with it."""
    packages = [describe(place) for place in places(folder)]
    contract, stated = read_contract(folder)
    for package in packages:
        package.faults.extend(contract_faults(package.config, stated))
    apart = differences(packages)
    faults = [*(fault for package in packages for fault in package.faults), *apart]
    if as_json:
        document({"packages": [package.shown() for package in packages], "contract": contract, "faults": faults})
        return FAILED if faults else OK
    for package in packages:
        _print(plain(package.shown()))
    for fault in apart:
        people().print(Text(plain(f"wrong: {fault}"), style="red"))
    if contract:
        table = Table(title="capture contract", title_justify="left", box=None, pad_edge=False, show_header=False)
        for name, value in plain(contract).items():
            table.add_row(escape(name), escape(value_text(value)))
        people().print(table)
    return FAILED if faults else OK


def places(folder: Path) -> list[Path]:
    """The folders of `folder` that hold a drafter. Raises InvalidRequest where there is none."""
    found = [p for p in (folder, folder / "sglang", folder / "speculators") if (p / "config.json").is_file()]
    if not found:
        raise InvalidRequest(
            f"{folder} holds no drafter: no config.json in it, in sglang/ or in speculators/",
            remedy="name the folder that `aerie demo` or `aerie download` made",
        )
    return found


def read_contract(folder: Path) -> tuple[dict[str, Any] | None, CaptureContract | None]:
    """The capture contract that was packaged with the drafter, as it stands there and as one; None without one.

    Raises NoConfig where it is none.
    """
    place = next(
        (p for p in (folder / "contract.json", folder.absolute().parent / "contract.json") if p.is_file()), None
    )
    if place is None:
        return None, None
    document = read_json(place)
    try:
        return document, CaptureContract.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        raise NoConfig(
            f"{place} is no capture contract: {placed(first)}",
            remedy="download the drafter again",
        ) from None


def _print(package: dict[str, Any]) -> None:
    console = people()
    console.print(f"[bold]{escape(package['folder'])}[/], {package['parameters']:,} parameters")
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in package["config"].items():
        table.add_row(name, escape(value_text(value)))
    console.print(table)
    table = Table(box=None, pad_edge=False)
    for name in ("tensor", "dtype", "shape"):
        table.add_column(name)
    for name, tensor in package["tensors"].items():
        table.add_row(escape(name), tensor["dtype"], escape(value_text(tensor["shape"])))
    console.print(table)
    for fault in package["faults"]:
        console.print(Text(f"wrong: {fault}", style="red"))
    if not package["faults"]:
        console.print("[green]nothing wrong with it[/]")
