"""A whole embedded house for tests that cross boundaries: started with `aerie up` as a person would, on a free port."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import httpx

Found = TypeVar("Found")
PATIENCE_S = 240.0
"""Longest wait for one event; reaching it fails the test with what was waited for."""


def wait_for(what: str, look: Callable[[], Found | None], patience_s: float = PATIENCE_S) -> Found:
    """What `look` finds, as soon as it finds something. Raises AssertionError that says what never came."""
    tick = threading.Event()
    for _ in range(int(patience_s / 0.05)):
        found = look()
        if found:
            return found
        tick.wait(0.05)
    raise AssertionError(f"waited {patience_s:.0f} s for {what}")


def processes() -> dict[int, tuple[int, str]]:
    """Every living process: pid -> (parent's pid, command line)."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            found[int(entry.name)] = (int(parent), command)
    return found


class House:
    """A running `aerie up` and a client of its API."""

    PARTS: ClassVar[dict[str, str]] = {
        "api": "-m aerie_api",
        "worker": "-m aerie_worker",
        "child": "-m eagle3_core.stages.child",
    }

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.process = process

    @property
    def url(self) -> str:
        """Where the API listens now (it keeps its port over restarts)."""
        return str(json.loads((self.folder / "run/server.json").read_text())["url"])

    @property
    def api_pid(self) -> int:
        """The process that is the API now, as it says itself."""
        return int(json.loads((self.folder / "run/server.json").read_text())["pid"])

    @property
    def key(self) -> dict[str, str]:
        """The header with the house's first admin key; one that asks for none has none."""
        place = self.folder / "run/admin.key"
        return {"Authorization": f"Bearer {place.read_text().strip()}"} if place.exists() else {}

    def request(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, **kwargs: Any
    ) -> httpx.Response:
        """One request; waits while the API is away."""

        def answer() -> httpx.Response | None:
            try:
                return httpx.request(
                    method, self.url + path, timeout=30, headers={**self.key, **(headers or {})}, **kwargs
                )
            except (httpx.TransportError, FileNotFoundError, json.JSONDecodeError):
                return None

        return wait_for(f"an answer to {method} {path}", answer)

    def post(self, job: dict[str, Any]) -> str:
        """Post a job and return its id; posted again where the answer does not come, it is still one job."""
        key = {"Idempotency-Key": secrets.token_hex(16)}

        def answer() -> httpx.Response | None:
            response = self.request("POST", "/jobs", json=job, headers=key)
            return None if '"idempotency.in_flight"' in response.text else response

        response = wait_for("an answer to the job", answer)
        assert response.status_code == 202, response.text
        return str(response.json()["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        """The job's document."""
        response = self.request("GET", f"/jobs/{job_id}")
        assert response.status_code == 200, response.text
        return response.json()

    def finished(self, job_id: str) -> dict[str, Any]:
        """The job's document once it has ended."""

        def ended() -> dict[str, Any] | None:
            job = self.job(job_id)
            return job if job["status"] in ("succeeded", "failed", "cancelled") else None

        return wait_for(f"the end of {job_id}", ended, 600)

    def descendants(self) -> dict[int, str]:
        """The house's own processes: pid -> command line. Nothing else on the machine is ever touched."""
        living, mine = processes(), {self.process.pid}
        while more := {pid for pid, (parent, _) in living.items() if parent in mine} - mine:
            mine |= more
        return {pid: living[pid][1] for pid in mine if pid in living}

    def kill(self, part: str) -> list[int]:
        """`kill -9` every process of one part of this house; returns whom it hit."""
        hit = [pid for pid, command in self.descendants().items() if self.PARTS[part] in command]
        for pid in hit:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return hit


@contextmanager
def running_house(
    folder: Path, roots: list[Path], workers: int = 2, settings: Mapping[str, str] | None = None
) -> Iterator[House]:
    """`aerie up` in `folder` (told `settings` by its environment), stopped (and seen to be gone) at the end."""
    environment = {**os.environ, **(settings or {}), "AERIE_FILE_ROOTS": ":".join(map(str, roots))}
    log = (folder.parent / f"{folder.name}.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "aerie_cli", "up", "--dir", str(folder), "--port", "0", "--workers", str(workers)],
        stdout=log, stderr=subprocess.STDOUT, env=environment,
    )  # fmt: skip
    house = House(folder, process)
    try:
        wait_for(
            "the API", lambda: (folder / "run/server.json").exists() and house.request("GET", "/readyz").is_success
        )
        yield house
    finally:
        everyone = set(house.descendants())
        process.terminate()
        process.wait(60)
        log.close()
        wait_for("every process of the house to be gone", lambda: not (everyone & set(processes())), 30)
