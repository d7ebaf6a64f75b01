"""Tenants and their keys, made over the API as an operator makes them."""

from __future__ import annotations

from typing import Any


def admin(api: Any) -> dict[str, str]:
    return bearer((api.folder / "run" / "admin.key").read_text().strip())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def tenant(api: Any, name: str, scopes: list[str] | None = None, **limits: Any) -> dict[str, str]:
    """A new tenant, and the headers of a key of theirs."""
    assert api.http.post("/tenants", json={"id": name, **limits}, headers=admin(api)).status_code == 201
    return key(api, name, scopes)["headers"]


def key(api: Any, name: str, scopes: list[str] | None = None, **more: Any) -> dict[str, Any]:
    wanted = {"tenant": name, "name": "test", "scopes": scopes or ["jobs:read", "jobs:write"], **more}
    answer = api.http.post("/keys", json=wanted, headers=admin(api))
    assert answer.status_code == 201, answer.text
    return {**answer.json(), "headers": bearer(answer.json()["secret"])}
