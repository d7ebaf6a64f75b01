"""Where a job's data may come from: files under the folders that the operator lists, and nothing else.

A job is posted by somebody who cannot read this machine's disk otherwise, so a path is judged by where it really leads
(links followed) and before anybody looks whether it exists: the answer must not tell what lies outside the roots.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from eagle3_core.digests import digest_file
from eagle3_core.errors import AerieError

MAX_ENTRIES = 10_000
"""Entries of a checkpoint's folder that are looked at; those in use have up to 200."""


class SourceScheme(AerieError):
    """The URI is of a kind that this version does not read."""

    code, status = "source.scheme", 422


class SourceNotAllowed(AerieError):
    """The path does not lie under a folder that the operator lists."""

    code, status = "source.not_allowed", 422


def roots_of(tenant: str, roots: Sequence[Path]) -> tuple[Path, ...]:
    """The folders of one tenant: `{tenant}` in a root that the operator lists stands for the tenant's name."""
    return tuple(Path(str(root).replace("{tenant}", tenant)) for root in roots)


def path_of(uri: str, *, pointer: str | None = None) -> Path:
    """The absolute path that `uri` (`file:///PATH`, percent-decoded, or an absolute path as it stands) names, links and all.

    The one place where such a URI is read. It judges no roots: `resolve` does. Raises SourceScheme.
    """
    if uri.startswith("/"):
        path = uri
    else:
        try:
            parts = urlsplit(uri)
        except ValueError as error:
            raise _scheme(uri, str(error), pointer) from None
        if parts.scheme != "file":
            what = f"scheme {parts.scheme!r}" if parts.scheme else "a relative path"
            raise _scheme(uri, what, pointer)
        if parts.netloc not in ("", "localhost"):
            raise _scheme(uri, f"the host {parts.netloc!r}", pointer)
        if parts.query or parts.fragment or not parts.path.startswith("/"):
            raise _scheme(uri, "no plain absolute path", pointer)
        path = unquote(parts.path, errors="surrogateescape")
    if "\0" in path:
        raise _scheme(repr(uri), "a NUL byte", pointer)
    return Path(path)


def same_source(one: str, other: str) -> bool:
    """Whether two URIs name one path, in whatever form either was written; no file is looked at."""
    if one == other:
        return True
    try:
        return os.path.normpath(path_of(one)) == os.path.normpath(path_of(other))
    except SourceScheme:
        return False


def resolve(uri: str, roots: Sequence[Path], *, pointer: str | None = None) -> Path:
    """The real path that `uri` (`file:///PATH` or an absolute path) names. It may not exist: whoever opens it says what is missing.

    Raises SourceScheme for other URIs, SourceNotAllowed for what leads outside `roots`.
    """
    path = path_of(uri, pointer=pointer)
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(os.path.realpath(root)) for root in roots):
        listed = ", ".join(map(str, roots)) or "none"
        raise SourceNotAllowed(
            f"{uri} does not lie under a folder that the operator lists ({listed})",
            remedy="move the file there, or list its folder in AERIE_FILE_ROOTS where the API and the workers run",
            pointer=pointer,
        )
    return real


def resolve_folder(uri: str, roots: Sequence[Path], *, pointer: str | None = None) -> Path:
    """Like `resolve`, for a folder whose files will be read: none of them may be a link that leads outside `roots`."""
    folder = resolve(uri, roots, pointer=pointer)
    try:
        links = [entry.name for entry in itertools.islice(os.scandir(folder), MAX_ENTRIES) if entry.is_symlink()]
    except OSError:  # no folder, or none that can be read: whoever reads it says so
        return folder
    for name in links:
        _ = resolve(str(folder / name), roots, pointer=pointer)
    return folder


def fingerprint(path: Path) -> str:
    """Hex BLAKE3 of a file's content: what a stage's key knows a data set by. Raises OSError."""
    return digest_file(path)


def _scheme(uri: str, what: str, pointer: str | None) -> SourceScheme:
    return SourceScheme(
        f"{uri} has {what}; files of this machine are read, as file:///PATH or an absolute path",
        remedy="copy the data to a folder that the operator lists and name it by its absolute path",
        pointer=pointer,
    )
