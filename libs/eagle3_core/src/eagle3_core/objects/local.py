"""A folder as object store: the embedded default.

Every write goes to a temporary file beside its target, is flushed to disk and renamed, so a reader or a crash sees
an object whole or not at all. Reads are served in place.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from eagle3_core.objects.probe import probe_basics
from eagle3_core.objects.protocol import (
    MADE_AGAIN,
    Abilities,
    ObjectMissing,
    Stat,
    StoreFull,
    StoreRefused,
    checked_key,
)

_TEMPORARY = ".tmp-"


class LocalStore:
    """Objects as files under `root`. Safe for many processes of one machine."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        self.root.mkdir(parents=True, exist_ok=True)

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key)

    def _write(self, key: str, fill: Callable[[IO[bytes]], object]) -> None:
        target = self._path(key)
        temporary = target.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
        with self._said(key):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("wb") as file:
                    fill(file)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            except BaseException:
                with suppress(OSError):  # where no file could be made, none can be removed
                    temporary.unlink(missing_ok=True)
                raise

    @contextmanager
    def _said(self, key: str) -> Generator[None]:
        """Raise StoreFull and StoreRefused for what the system says of `key`."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StoreFull(
                    f"no room for {key} under {self.root}", remedy="free disk space, then retry the job"
                ) from error
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise StoreRefused(
                    f"{error.filename or self.root}: {error.strerror}",
                    remedy=f"let this process read and write all of {self.root}, then retry the job",
                ) from error
            raise

    def put_bytes(self, key: str, data: bytes | memoryview) -> None:
        """Write `data` under `key`."""
        self._write(key, lambda file: file.write(data))

    def put_file(self, key: str, path: Path) -> None:
        """Copy the file `path` under `key`."""
        with path.open("rb") as source:
            self._write(key, lambda file: shutil.copyfileobj(source, file, 1 << 22))

    def get_bytes(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Read `length` bytes from `start`, or to the end."""
        try:
            with self._said(key), self._path(key).open("rb") as file:
                file.seek(start)
                return file.read() if length is None else file.read(length)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise self._missing(key) from None

    def fetch(self, key: str, folder: Path) -> Path:
        """The object's own file; `folder` stays untouched."""
        path = self._path(key)
        with self._said(key):
            if not path.is_file():
                raise self._missing(key)
        return path

    def stat(self, key: str) -> Stat:
        """Size and time of `key`."""
        try:
            with self._said(key):
                status = self._path(key).stat()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise self._missing(key) from None
        return Stat(key, status.st_size, status.st_mtime)

    def list(self, prefix: str) -> Iterator[Stat]:
        """Objects whose key starts with `prefix`, in key order."""
        base = self.root / prefix.rpartition("/")[0] if "/" in prefix else self.root
        keys = sorted(
            path.relative_to(self.root).as_posix()
            for path in base.rglob("*")
            if not path.name.startswith(_TEMPORARY) and path.is_file()
        )
        for key in keys:
            if key.startswith(prefix):
                try:
                    yield self.stat(key)
                except ObjectMissing:
                    continue  # deleted while we listed

    def delete(self, key: str) -> None:
        """Remove `key` if it is there."""
        with self._said(key):
            self._path(key).unlink(missing_ok=True)

    def free_bytes(self) -> int | None:
        """Free bytes of the file system that holds the store."""
        return shutil.disk_usage(self.root).free

    def download_url(self, key: str, expires_s: int, filename: str) -> str | None:
        """None: a folder serves nobody."""
        return None

    def abort_stale_uploads(self, older_than_s: float) -> int:
        """Remove the temporary files of writers that died."""
        limit, removed = time.time() - older_than_s, 0
        for path in self.root.rglob(f"{_TEMPORARY}*"):
            try:
                if path.stat().st_mtime <= limit:
                    path.unlink()
                    removed += 1
            except FileNotFoundError:
                continue  # its writer was only slow
        return removed

    def probe(self) -> Abilities:
        """Try everything once. Raises StoreUnfit."""
        probe_basics(self)
        return Abilities(multipart=True, conditional_put=False, presigned=False, versions=False, encrypted=False)

    def _missing(self, key: str) -> ObjectMissing:
        return ObjectMissing(f"no object {key} under {self.root}", remedy=MADE_AGAIN)
