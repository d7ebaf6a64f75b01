"""What the house asks of an object store: whole and ranged reads, atomic writes, listing, deletion.

Keys are `/`-separated, never reused for other content, and contain a fence and a content hash; nothing here or
above depends on conditional writes. An object is visible whole or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from eagle3_core.errors import AerieError
from eagle3_core.jobs.wire import ObjectAnswer, ObjectAsk

MADE_AGAIN = "retry the job (`aerie retry`): what is gone is made again"
"""What to do about an object that is missing."""


class ObjectMissing(AerieError):
    """The object store has no such object."""

    code, status, retryable = "object.missing", 404, True


class ObjectDamaged(AerieError):
    """An object's size or digest is not what its manifest says."""

    code, status, retryable = "object.damaged", 500, False


class StoreFull(AerieError):
    """The object store has no room."""

    code, status, retryable = "store.full", 507, True


class StoreUnavailable(AerieError):
    """The object store does not answer, or not whole, however often it is asked."""

    code, status, retryable = "store.unavailable", 503, True


class StoreRefused(AerieError):
    """The object store does not let this process in."""

    code, status, retryable = "store.refused", 502, True


class StoreUnfit(AerieError):
    """The object store lacks what the house needs."""

    code, status = "store.unfit", 500


class BadKey(AerieError):
    """A key leaves the store or is not well formed."""

    code, status = "object.key", 400


@dataclass(frozen=True)
class Stat:
    """An object's key, size in bytes and time of its last change (seconds since the epoch)."""

    key: str
    size: int
    modified: float


@dataclass(frozen=True)
class Abilities:
    """What a store was seen to do. Nothing of the house depends on the ones that may be missing."""

    multipart: bool
    """Large objects go up in parts."""
    conditional_put: bool
    """A second `create` of a key is refused."""
    presigned: bool
    """Downloads can be handed out as short-lived URLs."""
    versions: bool
    """Deleted objects stay as old versions; `delete` removes those too."""
    encrypted: bool
    """The store says that it encrypts what it is given."""

    def told(self) -> str:
        """This as a line for the log."""
        return ", ".join(f"{name.replace('_', ' ')} {'yes' if has else 'no'}" for name, has in asdict(self).items())


class ObjectStore(Protocol):
    """Bytes under keys."""

    def put_bytes(self, key: str, data: bytes | memoryview) -> None:
        """Write `data`; visible whole or not at all. Raises StoreFull."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Write the content of `path`; visible whole or not at all. Raises StoreFull."""
        ...

    def get_bytes(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Read an object or a range of it. Raises ObjectMissing."""
        ...

    def fetch(self, key: str, folder: Path) -> Path:
        """The object as a local file: in place where the store is local, else downloaded into `folder`."""
        ...

    def stat(self, key: str) -> Stat:
        """Size and time of an object. Raises ObjectMissing."""
        ...

    def list(self, prefix: str) -> Iterator[Stat]:
        """All objects whose key starts with `prefix`, in key order."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is fine."""
        ...

    def free_bytes(self) -> int | None:
        """Room left, where the store knows it."""
        ...

    def download_url(self, key: str, expires_s: int, filename: str) -> str | None:
        """A URL from which anyone may download `key` as `filename` for `expires_s` seconds; None where the store has none.

        Only for keys that a manifest lists; the caller sees to that.
        """
        ...

    def abort_stale_uploads(self, older_than_s: float) -> int:
        """Throw away what uploads left that began so long ago and never ended; returns how many."""
        ...

    def probe(self) -> Abilities:
        """Try everything once under a key of its own. Raises StoreUnfit, StoreRefused, StoreUnavailable."""
        ...


@runtime_checkable
class Lends(Protocol):
    """A store that can sign single requests for somebody who has no key to it."""

    def lend(self, ask: ObjectAsk, lasts_s: int) -> ObjectAnswer:
        """What `ask` wants, good for `lasts_s` seconds. The caller sees to it that it may be asked."""
        ...


_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]*(/[A-Za-z0-9_][A-Za-z0-9._=-]*)*")


def checked_key(key: str) -> str:
    """`key` if it is well formed (no empty, dotted or odd segment). Raises BadKey."""
    if len(key) > 1024 or not _KEY.fullmatch(key):
        raise BadKey(f"{key!r} is not a key", remedy="use letters, digits, '.', '_', '=', '-' between single slashes")
    return key
