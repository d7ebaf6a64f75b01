"""Tenants of one API and their keys, and the operations that its document lists."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fastapi.routing import APIRoute
from sqlalchemy import text

from aerie_api.guards import OPEN, WORKER_PREFIX

TABLES = (
    "jobs", "stages", "units", "attempts", "commits", "events", "logs", "drafters", "deletions", "tenants", "api_keys",
)  # fmt: skip
"""What a tenant has."""


@dataclass(frozen=True)
class Operation:
    """One method of one public address."""

    name: str
    method: str
    path: str
    ids: tuple[str, ...]
    """The names in its address."""
    query: tuple[str, ...]


def all_routes(app: Any) -> list[APIRoute]:
    """Every route of the application, described or not."""
    found, left = [], list(app.router.routes)
    while left:
        route = left.pop()
        if isinstance(route, APIRoute):
            found.append(route)
        left += getattr(getattr(route, "original_router", None), "routes", [])
    return found


def operations(api: Any) -> list[Operation]:
    """Every operation that the document lists."""
    return [
        Operation(
            described["operationId"], method.upper(), path, tuple(re.findall(r"{(\w+)", path)),
            tuple(p["name"] for p in described.get("parameters", []) if p["in"] == "query"),
        )
        for path, described_there in api.app.openapi()["paths"].items()
        for method, described in described_there.items()
    ]  # fmt: skip


def public_operations(api: Any) -> list[Operation]:
    """Every operation that needs a key."""
    return [o for o in operations(api) if not o.path.startswith(WORKER_PREFIX) and o.path not in OPEN]


def worker_operations(api: Any) -> list[Operation]:
    """Every operation that takes a token of the fleet or of an attempt."""
    return [o for o in operations(api) if o.path.startswith(WORKER_PREFIX)]


class Tenants:
    """Who has keys to `api`. `admin` is the operator."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.secrets = {"admin": (api.folder / "run" / "admin.key").read_text().strip()}
        self.keys: dict[str, str] = {}
        self.ids: dict[str, str] = {}

    def add(self, name: str, scopes: list[str], **limits: Any) -> None:
        """Make a tenant and a key of theirs."""
        assert self.ask("admin", "POST", "/tenants", json={"id": name, **limits}).status_code == 201
        made = self.ask("admin", "POST", "/keys", json={"tenant": name, "name": "test", "scopes": scopes}).json()
        self.secrets[name], self.keys[name] = made["secret"], made["id"]

    def ask(self, who: str, method: str, path: str, **sent: Any) -> Any:
        """One request of `who`."""
        headers = {"Authorization": f"Bearer {self.secrets[who]}", **sent.pop("headers", {})}
        return self.api.http.request(method, path, headers=headers, **sent)

    def post(self, who: str, document: dict[str, Any]) -> dict[str, Any]:
        """A job of `who`."""
        answer = self.ask(who, "POST", "/jobs", json=document)
        assert answer.status_code == 202, answer.text
        return answer.json()

    def stored_for(self, tenant: str) -> list[str]:
        """Every row of `tenant`, and the tenant's own."""
        tables = self.api.house.db.engine.connect()
        with tables as connection:
            found = []
            for table in TABLES:
                column = "id" if table == "tenants" else "tenant"
                rows = connection.execute(text(f"SELECT * FROM {table} WHERE {column} = :tenant"), {"tenant": tenant})
                found += sorted(f"{table}: {row!r}" for row in rows)
            return found
