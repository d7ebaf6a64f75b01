"""A finished drafter's files on this machine, each held against its digest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from aerie_cli.client import Api, Damaged
from eagle3_core.digests import digest_file


def download_drafter(api: Api, job_id: str, folder: Path, done: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """Write the files of the job's drafter into `folder` and return their list; `done(bytes, total)` hears the progress.

    `folder` is replaced as a whole once everything is there and verified. Raises Damaged, NotReachable.
    """
    files: list[dict[str, Any]] = api.get(f"/jobs/{job_id}/artifacts")["data"]
    fresh = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    total, have = sum(file["size"] for file in files), 0
    for file in files:
        target = fresh / _inside(file["name"])
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as out:
            for piece in api.download(file["href"]):
                out.write(piece)
                have += len(piece)
                done(have, total)
        if (digest := digest_file(target)) != file["blake3"]:
            raise Damaged(
                f"{file['name']} arrived with digest {digest[:16]}, its manifest says {file['blake3'][:16]}",
                remedy="download it again; if that does not help, retry the job",
            )
    shutil.rmtree(folder, ignore_errors=True)
    fresh.replace(folder)
    return files


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise Damaged(f"the API lists a file called {name!r}, which leaves its folder", remedy="do not trust this API")
    return path
