"""Which store a URL names: the one place that knows every adapter, so that nobody else chooses one."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from eagle3_core.errors import AerieError
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.protocol import ObjectStore


class UnknownStore(AerieError):
    """The URL names no object store that this version has."""

    code, status = "store.unknown", 500


def store_at(url: str) -> ObjectStore:
    """The object store at `url` (`file:///folder`). Raises UnknownStore."""
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise UnknownStore(f"{url!r} names no object store", remedy="use file:///absolute/folder")
    return LocalStore(Path(unquote(parts.path)))
