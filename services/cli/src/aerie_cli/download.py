"""`aerie download`: a finished drafter's files on this machine, each verified by its digest."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from aerie_cli.client import DEFAULT_DIR, Api, Damaged, Dir, Url, job_path
from aerie_cli.output import Json, aside, command, document, people, plain
from aerie_cli.watch import JobId
from eagle3_core.digests import digest_file
from eagle3_core.errors import AerieError, InvalidRequest

Out = Annotated[
    Path | None, typer.Option("--out", help="Folder to make, or to fill if it is empty. Default: the drafter's name.")
]
Done = Callable[[int, int], None]
"""Hears the progress: bytes so far, bytes in all."""


class NoDrafter(AerieError):
    """The job has no finished drafter."""

    code, status = "drafter.not_ready", 409


@command
def download(job: JobId, out: Out = None, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False) -> int:
    """Fetch the drafter of a finished job: sglang/, speculators/, its card, report and contract."""
    with Api.found(url, folder) as api:
        found = api.get(job_path(job))
        if not found.get("drafter"):
            ended = found["status"] in ("failed", "cancelled")
            raise NoDrafter(
                f"job {job} is {found['status']} and has no drafter",
                remedy=f"`aerie status {job}` says why: post a corrected job, or `aerie retry {job}` once what was in the way is gone"
                if ended
                else f"`aerie watch {job}` waits for it",
            )
        target = vacant(out if out is not None else Path(_inside(found["drafter"]["name"])))
        with download_bar() as done:
            files = download_drafter(api, job, target, done)
    if as_json:
        document(
            {
                "folder": str(target),
                "digest": found["drafter"]["digest"],
                "verdict": found.get("verdict"),
                "files": [file["name"] for file in files],
            }
        )
    else:
        people().print(
            plain(f"{target}: {len(files)} files of drafter {found['drafter']['digest'][:16]}"), markup=False
        )
        if found.get("verdict") == "fail":
            people().print(plain(f"its verdict is fail: do not serve it; `aerie watch {job}` says why"), markup=False)
    return 0


def vacant(folder: Path) -> Path:
    """`folder` without links on its way. Raises InvalidRequest where something lies there already, or no folder can:
    it is not ours to replace, and better said before gigabytes are fetched than after."""
    if folder.is_symlink():
        state = "a link" if folder.exists() else "a link to nothing"
        raise _taken(folder.absolute(), f"is {state}: {os.readlink(folder)}")
    try:
        place = folder.resolve()
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise _taken(place, "is there already")
        above = next(parent for parent in place.parents if parent.exists())
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        raise _taken(folder.absolute(), f"cannot be looked at: {error}") from None
    if not above.is_dir():
        raise _taken(place, f"would lie in {above}, which is no folder")
    return place


def _taken(folder: Path, why: str) -> InvalidRequest:
    return InvalidRequest(f"{folder} {why}", remedy="name an empty or a new folder with --out")


@contextmanager
def download_bar() -> Generator[Done]:
    """A bar with rate and time left, where people read."""
    bar = Progress(
        TextColumn("downloading the drafter"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=aside(), transient=True,
    )  # fmt: skip
    task = bar.add_task("", total=None)
    with bar:
        yield lambda have, total: bar.update(task, completed=have, total=total)


def download_drafter(
    api: Api, job_id: str, folder: Path, done: Done, *, replace: bool = False
) -> list[dict[str, Any]]:  # fmt: skip
    """Write the files of the job's drafter into `folder` and return their list.

    `folder`, absolute, appears as a whole once everything is there and verified. It is new or empty; with `replace` it is
    the caller's own and what it held goes. Raises Damaged, Unreachable, and InvalidRequest if it was filled meanwhile.
    """
    files: list[dict[str, Any]] = api.get(job_path(job_id, "artifacts"), "list")["data"]
    total, have = sum(file["size"] for file in files), 0
    with _beside(folder) as room:
        fresh = room / "fresh"
        fresh.mkdir()
        for file in files:
            target = fresh / _inside(file["name"])
            target.parent.mkdir(parents=True, exist_ok=True)
            for size in _write(api, file, target):
                have += size
                done(have, total)
        _put(fresh, folder, aside=room / "old" if replace else None)
    return files


@contextmanager
def _beside(folder: Path) -> Generator[Path]:
    """A new folder of ours beside `folder`, whose parents are made; it goes at the end, they go if the block fails."""
    made = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        room = Path(tempfile.mkdtemp(prefix=".aerie-", dir=folder.parent))
        try:
            yield room
        finally:
            shutil.rmtree(room, ignore_errors=True)
    except BaseException:  # whatever ended it, half a drafter is nobody's
        for parent in made:
            with suppress(OSError):  # somebody put something there
                parent.rmdir()
        raise


def _put(fresh: Path, folder: Path, *, aside: Path | None) -> None:
    """Move `fresh` to `folder`: over an empty one, or where what lay there is moved `aside` and back if that fails."""
    old = aside is not None and folder.exists()
    if aside is not None and old:
        folder.replace(aside)
    try:
        fresh.replace(folder)
    except OSError as error:
        if aside is not None and old:
            aside.replace(folder)
        raise _taken(folder, f"cannot be put there: {error.strerror}") from None


def _write(api: Api, file: dict[str, Any], target: Path) -> Iterator[int]:
    """Write one file, yielding the size of each piece. Raises Damaged where it is not what the list says."""
    size = 0
    with target.open("wb") as out:
        for piece in api.download(file["href"]):
            size += len(piece)
            if size > file["size"]:
                break
            out.write(piece)
            yield len(piece)
    if size != file["size"]:
        fault = f"{'more' if size > file['size'] else size} bytes, its manifest says {file['size']}"
    elif (digest := digest_file(target)) != file["blake3"]:
        fault = f"digest {digest[:16]}, its manifest says {file['blake3'][:16]}"
    else:
        return
    raise Damaged(
        f"{file['name']} arrived with {fault}", remedy="download it again; if that does not help, retry the job"
    )


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise Damaged(f"the API lists a file called {name!r}, which leaves its folder", remedy="do not trust this API")
    return path
