"""Which store a URL names: the one place that knows every adapter, so that nobody else chooses one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from eagle3_core.errors import AerieError
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.protocol import ObjectStore


class UnknownStore(AerieError):
    """The URL names no object store that this version has."""

    code, status = "store.unknown", 422


def store_at(url: str, environment: Mapping[str, str] = os.environ) -> ObjectStore:
    """The object store at `url`: `file:///folder`, `s3://bucket/prefix?endpoint=https://host` (`objects.s3_address`), or
    `lent:///socket`, one whose requests are signed by whoever serves that socket (`objects.lent`).

    Credentials come from `environment` alone. Raises UnknownStore, BadStoreUrl, StoreRefused.
    """
    scheme, _, _ = url.partition(":")
    if scheme == "s3":
        from eagle3_core.objects.s3 import s3_store  # its two clients take a third of a second to import

        return s3_store(url, environment)
    if scheme == "lent":
        from eagle3_core.objects.lent import LentStore
        from eagle3_core.objects.lent_desk import Desk

        return LentStore(Desk(Path(unquote(urlsplit(url).path))), url)
    parts = urlsplit(url)
    if scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise UnknownStore(
            f"a URL that begins with {scheme[:20]!r} names no object store",
            remedy="use file:///absolute/folder or s3://bucket/prefix?endpoint=https://host",
        )
    return LocalStore(Path(unquote(parts.path)))


def url_of(store: ObjectStore) -> str:
    """The URL under which another process of this machine, with this environment, opens `store`. Raises UnknownStore."""
    if isinstance(store, LocalStore):
        return store.root.as_uri()
    if url := str(getattr(store, "url", "")):
        return url
    raise UnknownStore(f"{type(store).__name__} has no URL", remedy="open it by store_at")
