"""`aerie keys`: make, list, replace and end the API's keys. It takes a key with the scope `admin` itself.

A new key's text is printed once, alone on stdout, so that a script can put it where it belongs.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url
from aerie_cli.output import Json, aside, command, document, people, plain
from eagle3_core.errors import InvalidRequest

keys = typer.Typer(name="keys", no_args_is_help=True, help="The API's keys: who may ask, and what.")
KeyId = Annotated[str, typer.Argument(metavar="KEY", help="Id of a key, as `aerie keys list` shows it.")]
Scopes = Annotated[
    list[str], typer.Option("--scope", help="What it may do: jobs:read, jobs:write, deploy, admin. May be repeated.")
]
Expires = Annotated[float | None, typer.Option("--expires-in", min=1, help="Seconds after which it ends.")]
Tenant = Annotated[str, typer.Option("--tenant", help="Whose key it is.")]
Overlap = Annotated[float, typer.Option("--overlap", min=0, help="Seconds for which the old key still counts.")]
DAY_S = 86400.0


@keys.command("create")
@command
def create(
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    scope: Scopes,
    tenant: Tenant = "default",
    expires_in: Expires = None,
    url: Url = None,
    folder: Dir = DEFAULT_DIR,
    as_json: Json = False,
) -> int:
    """Make a key, and print it this once."""
    wanted = {"name": name, "tenant": tenant, "scopes": scope, "expires_in_s": expires_in}
    with Api.found(url, folder) as api:
        return _show_new(api.post("/keys", wanted, kind="key"), as_json)


@keys.command("rotate")
@command
def rotate(
    key: KeyId,
    overlap: Overlap = DAY_S,
    expires_in: Expires = None,
    url: Url = None,
    folder: Dir = DEFAULT_DIR,
    as_json: Json = False,
) -> int:
    """Replace a key by a new one, and print that one this once."""
    with Api.found(url, folder) as api:
        fresh = api.post(f"{_path(key)}/rotate", {"overlap_s": overlap, "expires_in_s": expires_in}, kind="key")
        return _show_new(fresh, as_json)


@keys.command("revoke")
@command
def revoke(key: KeyId, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False) -> int:
    """End a key at once."""
    with Api.found(url, folder) as api:
        ended = api.read(api.call("DELETE", _path(key)), "key")
    if as_json:
        document(ended)
    else:
        people().print(f"{ended['id']}  {escape(plain(ended['name']))}  revoked")
    return 0


@keys.command("list")
@command
def list_(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Keys of this tenant only.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100, help="Newest keys to list.")] = 20,
    url: Url = None,
    folder: Dir = DEFAULT_DIR,
    as_json: Json = False,
) -> int:
    """List keys, newest first; never their secrets."""
    with Api.found(url, folder) as api:
        found = api.get("/keys", "list", tenant=tenant, limit=limit)
    if as_json:
        document(found)
        return 0
    table = Table("id", "tenant", "name", "scopes", "ends", "last used", box=None)
    for key in found["data"]:
        ends = "revoked" if key["revoked_at"] is not None else _when(key["expires_at"])
        table.add_row(key["id"], key["tenant"], escape(plain(key["name"])), " ".join(key["scopes"]), ends,
                      _when(key["last_used_at"]))  # fmt: skip
    people().print(table)
    return 0


def _path(key: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{16}", key):
        raise InvalidRequest(f"{plain(key)!r} is no key's id", remedy="`aerie keys list` shows the ids")
    return f"/keys/{key}"


def _show_new(fresh: dict[str, Any], as_json: bool) -> int:
    if as_json:
        document(fresh)
        return 0
    aside().print(f"key {fresh['id']} of {fresh['tenant']}: {' '.join(fresh['scopes'])}; it is not shown again")
    people().print(fresh["secret"], markup=False)
    return 0


def _when(at: float | None) -> str:
    return "-" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")
