"""What a running API holds: its process as the kernel knows it, and the rows of its database, table by table."""

from __future__ import annotations

import os
import resource
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

UNITS = {"rss": "MiB", "descriptors": "open", "connections": "open"}
"""Of figures; those of tables count rows."""


def of_process(pid: int) -> dict[str, float]:
    """RSS in MiB, open descriptors, and how many of these are sockets."""
    place = Path("/proc") / str(pid)
    pages = int((place / "statm").read_text().split()[1])
    opened = [os.readlink(entry) for entry in (place / "fd").iterdir() if entry.is_symlink()]
    sockets = sum(name.startswith("socket:") for name in opened)
    return {"rss": pages * resource.getpagesize() / 2**20, "descriptors": len(opened), "connections": sockets}


def of_database(folder: Path, settings: Mapping[str, str]) -> dict[str, float]:
    """Rows of every table that has any, and of all together, as `rows_TABLE` and `rows`."""
    counts = _postgres(settings["AERIE_DATABASE_URL"]) if "AERIE_DATABASE_URL" in settings else _sqlite(folder)
    counted = {f"rows_{table}": float(count) for table, count in sorted(counts.items()) if count}
    return {"rows": sum(counted.values()), **counted}


def _sqlite(folder: Path) -> dict[str, int]:
    with closing(sqlite3.connect(f"file:{folder / 'data/aerie.db'}?mode=ro", uri=True)) as database:
        named = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        return {name: database.execute(_count(name)).fetchone()[0] for (name,) in named.fetchall()}


def _postgres(url: str) -> dict[str, int]:
    import psycopg

    with psycopg.connect(url) as database:
        named = database.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        counted = {name: database.execute(_count(name).encode()).fetchone() for (name,) in named}
        return {name: int(count[0]) for name, count in counted.items() if count is not None}


def _count(table: str) -> str:
    return f'SELECT count(*) FROM "{table}"'  # noqa: S608 - the database named it
