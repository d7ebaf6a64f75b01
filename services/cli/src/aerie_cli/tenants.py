"""`aerie tenants`: make tenants, say what they may use and see what they use. It takes a key with the scope `admin`.

A limit that is not named stays as it is; the word `none` takes one away.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from rich.table import Table

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url
from aerie_cli.output import Json, command, document, people, plain
from eagle3_core import patterns
from eagle3_core.errors import InvalidRequest

tenants = typer.Typer(name="tenants", no_args_is_help=True, help="Tenants: what each may use, and uses.")
NONE = "none"
Name = Annotated[str, typer.Argument(metavar="TENANT", help="Name of the tenant.")]
Weight = Annotated[
    float | None, typer.Option("--weight", help="Share of the workers against tenants that have work waiting.")
]
Running = Annotated[
    str | None, typer.Option("--max-running-jobs", metavar="N", help="Jobs that run at once; further ones wait.")
]
Living = Annotated[
    str | None,
    typer.Option("--max-living-jobs", metavar="N", help="Jobs that have not ended; a further post is refused."),
]
GpuHours = Annotated[
    str | None,
    typer.Option("--gpu-hours", metavar="HOURS", help="GPU time of the last 30 days; then nothing more starts."),
]
StoreBytes = Annotated[
    str | None,
    typer.Option("--store-bytes", metavar="BYTES", help="What results may hold; over it jobs wait for room."),
]


@tenants.command("create")
@command
def create(
    tenant: Name,
    weight: Weight = None,
    max_running_jobs: Running = None,
    max_living_jobs: Living = None,
    gpu_hours: GpuHours = None,
    store_bytes: StoreBytes = None,
    url: Url = None,
    folder: Dir = DEFAULT_DIR,
    as_json: Json = False,
) -> int:
    """Make a tenant."""
    limits = _limits(weight, max_running_jobs, max_living_jobs, gpu_hours, store_bytes)
    with Api.found(url, folder) as api:
        return _show(api.post("/tenants", {"id": tenant, **limits}, kind="tenant"), as_json)


@tenants.command("limit")
@command
def limit(
    tenant: Name,
    weight: Weight = None,
    max_running_jobs: Running = None,
    max_living_jobs: Living = None,
    gpu_hours: GpuHours = None,
    store_bytes: StoreBytes = None,
    url: Url = None,
    folder: Dir = DEFAULT_DIR,
    as_json: Json = False,
) -> int:
    """Change limits of a tenant; `none` takes one away, what is not named stays."""
    limits = _limits(weight, max_running_jobs, max_living_jobs, gpu_hours, store_bytes)
    if not re.fullmatch(patterns.TENANT_NAME, tenant):
        raise InvalidRequest(f"{plain(tenant)!r} is no tenant's name", remedy="`aerie tenants list` shows the names")
    with Api.found(url, folder) as api:
        return _show(api.read(api.call("PATCH", f"/tenants/{tenant}", body=limits), "tenant"), as_json)


@tenants.command("list")
@command
def list_(
    limit: Annotated[int, typer.Option("--limit", min=1, max=100, help="Tenants to list.")] = 20,
    after: Annotated[str | None, typer.Option("--after", help="Those that come after this name.")] = None,
    url: Url = None,
    folder: Dir = DEFAULT_DIR,
    as_json: Json = False,
) -> int:
    """List tenants by name, what they use and what they may."""
    with Api.found(url, folder) as api:
        found = api.get("/tenants", "list", limit=limit, after=after)
    if as_json:
        document(found)
    else:
        people().print(_table(found["data"]))
    return 0


def _limits(
    weight: float | None, running: str | None, living: str | None, hours: str | None, size: str | None
) -> dict[str, Any]:
    """The limits that were named, as the API takes them. Raises InvalidRequest."""
    given = {
        "max_running_jobs": _number("--max-running-jobs", running, int),
        "max_living_jobs": _number("--max-living-jobs", living, int),
        "gpu_hours": _number("--gpu-hours", hours, float),
        "store_bytes": _number("--store-bytes", size, int),
    }
    named = {name: None if value == NONE else value for name, value in given.items() if value is not None}
    return named if weight is None else {"weight": weight, **named}


def _number(option: str, text: str | None, kind: type[int] | type[float]) -> int | float | str | None:
    """`text` as a number; None where the option is not named, and `none` as it is. Raises InvalidRequest."""
    if text is None or text == NONE:
        return text
    try:
        return kind(text)
    except ValueError:
        raise InvalidRequest(
            f"{option} {plain(text)!r} is no {'whole ' * (kind is int)}number", remedy=f"give a number, or {NONE}"
        ) from None


def _show(tenant: dict[str, Any], as_json: bool) -> int:
    if as_json:
        document(tenant)
    else:
        people().print(_table([tenant]))
    return 0


def _table(shown: list[dict[str, Any]]) -> Table:
    table = Table("tenant", "weight", "running jobs", "living jobs", "GPU-hours", "bytes in the store", box=None)
    for tenant in shown:
        limits, usage = tenant["limits"], tenant["usage"]
        table.add_row(
            tenant["id"], f"{limits['weight']:g}",
            _of(usage["running_jobs"], limits["max_running_jobs"]), _of(usage["living_jobs"], limits["max_living_jobs"]),
            _of(round(usage["gpu_hours"], 1), limits["gpu_hours"]), _of(usage["store_bytes"], limits["store_bytes"]),
        )  # fmt: skip
    return table


def _of(used: float, limit: float | None) -> str:
    return f"{used}" if limit is None else f"{used} of {limit}"
