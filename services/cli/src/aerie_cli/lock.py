"""One supervisor for one folder: two would start two APIs over one database."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO

from eagle3_core.errors import AerieError


class AlreadyUp(AerieError):
    """Another supervisor holds this folder."""

    code, status = "up.running", 409


class UnusableFolder(AerieError):
    """The folder for the embedded house cannot be made or written."""

    code, status = "up.folder", 422


def require_writable(folder: Path) -> None:
    """Make `folder` and try it. Raises UnusableFolder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"?")
    except OSError as error:
        raise UnusableFolder(
            f"{folder} cannot be written: {error.strerror}",
            remedy="make room, or choose a folder that you may write with --dir",
        ) from None


class Lock:
    """Keeps a folder to one supervisor, by a lock that the kernel drops with its holder."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises AlreadyUp that names the holder, UnusableFolder."""
        path = folder / "run" / "up.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = path.open("a+")
        except OSError as error:
            raise UnusableFolder(
                f"{folder} cannot hold the house: {error.strerror}",
                remedy="choose a folder that you may write with --dir",
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise AlreadyUp(
                f"another `aerie up` (process {holder}) serves {folder}",
                remedy=f"use it, stop it with `kill {holder}`, or choose another folder with --dir",
            ) from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        """Let the folder go."""
        self._file.truncate(0)
        self._file.close()
