"""`aerie support-bundle`: what somebody who helps needs to see, in one zip file, and no secret.

Everything goes through one gate (`Bundle.add`), which hides what is named like a secret, what looks like one, and every
secret that can be found on this machine: the values of variables, and the content of the files that they or the house
name. What cannot be had (an API that is away, a log that is not there) is said in the bundle and stops nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import typer

from aerie_cli.client import DEFAULT_DIR, Api, Dir, Url, job_path
from aerie_cli.output import Json, aside, command, document, people
from eagle3_core.errors import AerieError
from eagle3_core.telemetry.secrets import HIDDEN, hide, named_secret

LOG_BYTES = 1 << 20
"""Of each log's end."""
SECRET_FILE_BYTES = 65536
OURS = ("AERIE_", "OTEL_", "CUDA_", "NVIDIA_", "HF_", "OMP_", "NCCL_", "AWS_", "TOKENIZERS_")
"""Beginnings of variables whose values are told (if they are no secrets); of others, only that they are set."""
PACKAGES = (
    "eagle3_core", "aerie_api", "aerie_worker", "aerie_cli", "aerie_verifier", "torch", "transformers", "speculators",
    "sglang", "safetensors", "fastapi", "sqlalchemy", "celery", "redis", "minio", "pydantic",
)  # fmt: skip

Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="The file to write. Default: aerie-support-TIME.zip here.")
]
Job = Annotated[str | None, typer.Argument(metavar="[JOB]", help="A job that it is about.")]


class BundleExists(AerieError):
    """The file to write is there already, or cannot be written."""

    code, status = "support.file", 409


@command
def support_bundle(
    job: Job = None, out: Out = None, url: Url = None, folder: Dir = DEFAULT_DIR, as_json: Json = False
) -> int:
    """Gather versions, settings, logs and what the API says (of JOB, if given) in a zip file without secrets."""
    place = out or Path(f"aerie-support-{time.strftime('%Y%m%d-%H%M%S')}.zip")
    with Bundle(place, secrets_of(os.environ, folder)) as bundle:
        bundle.add("about.json", about(folder))
        bundle.add("settings.json", settings_of(os.environ))
        for log in sorted((folder / "logs").glob("*.log*")):
            bundle.gather(f"logs/{log.name}", lambda log=log: tail(log))
        bundle.gather("api/address.txt", lambda: _ask(bundle, url, folder, job))
    if as_json:
        document({"object": "support.bundle", "path": str(place), "files": bundle.names})
    else:
        people().print(str(place), markup=False)
        aside().print("Secrets are replaced by [secret]; prompts and paths in logs are not. Look before you send it.",
                      markup=False)  # fmt: skip
    return 0


def _ask(bundle: Bundle, url: str | None, folder: Path, job: str | None) -> str:
    """Add what the API says; where it is."""
    with Api.found(url, folder) as api:
        for name, path in {**ALWAYS, **(of_job(job) if job is not None else {})}.items():
            bundle.gather(f"api/{name}.json", lambda path=path: api.call("GET", path).json())
        if job is not None:
            for name in ("events", "logs"):
                bundle.gather(f"api/job-{name}.json", lambda name=name: api.all(job_path(job, name)))
        return api.url


ALWAYS = {
    "healthz": "/healthz", "readyz": "/readyz", "me": "/me", "workers": "/workers", "storage": "/storage",
    "jobs": "/jobs",
}  # fmt: skip


def of_job(job: str) -> dict[str, str]:
    """What is asked about one job. Raises InvalidRequest."""
    return {
        "job": job_path(job), "job-attempts": job_path(job, "attempts"), "job-metrics": job_path(job, "metrics"),
        "job-artifacts": job_path(job, "artifacts"),
    }  # fmt: skip


class Bundle:
    """A zip file that only its owner can read; it is there whole or not at all."""

    def __init__(self, place: Path, secrets: Iterable[str]) -> None:
        self._place = place
        self._secrets = sorted(set(secrets))
        self._unfinished = place.with_name(f".{place.name}.{os.getpid()}")
        self.names: list[str] = []

    def __enter__(self) -> Bundle:
        """Begin. Raises BundleExists."""
        if self._place.exists():
            raise BundleExists(f"{self._place} is there already", remedy="name another file with --out")
        try:
            descriptor = os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise BundleExists(f"{self._place} cannot be written: {error.strerror}", remedy="use --out") from None
        self._file = os.fdopen(descriptor, "wb")
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_DEFLATED)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the file its name, or leave nothing."""
        self._zip.close()
        self._file.close()
        if kind is None:
            self._unfinished.replace(self._place)
        else:
            self._unfinished.unlink()

    def add(self, name: str, content: Any) -> None:
        """Put in `content` (text, or what JSON can say) without its secrets."""
        told = hide(content, self._secrets)
        self._zip.writestr(name, told if isinstance(told, str) else json.dumps(told, indent=1, default=str) + "\n")
        self.names.append(name)

    def gather(self, name: str, get: Callable[[], Any]) -> None:
        """Put in what `get` finds, or why it finds nothing."""
        try:
            self.add(name, get())
        except AerieError as error:
            self.add(f"{name}.missing.txt", error.text())
        except (OSError, ValueError) as error:
            self.add(f"{name}.missing.txt", f"{type(error).__name__}: {error}")


def tail(log: Path) -> str:
    """The end of a log, in whole lines."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        text = file.read().decode(errors="replace")
    return text if size <= LOG_BYTES else text.partition("\n")[2]


def about(folder: Path) -> dict[str, Any]:
    """Versions and the machine."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    disk = shutil.disk_usage(folder if folder.exists() else Path())
    return {
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "versions": versions, "python": sys.version,
        "platform": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "disk_free_bytes": disk.free,
        "gpus": sorted(device.name for device in Path("/dev").glob("nvidia[0-9]*")), "folder": str(folder.absolute()),
    }  # fmt: skip


def settings_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """Variables that matter with their values, but for secrets; the names of the others."""
    told = {
        name: HIDDEN if named_secret(name) and not name.endswith("_FILE") else value
        for name, value in environment.items()
        if name.startswith(OURS)
    }
    return {"set": dict(sorted(told.items())), "also_set": sorted(environment.keys() - told.keys())}


def secrets_of(environment: Mapping[str, str], folder: Path) -> set[str]:
    """Every secret that this machine tells us of: they are to stand nowhere in the bundle."""
    found = {value for name, value in environment.items() if named_secret(name) and not name.endswith("_FILE")}
    found |= {password for value in environment.values() for password in _passwords(value)}
    named = [value for name, value in environment.items() if name.endswith("_FILE") and value]
    for place in [*map(Path, named), *(folder / "run").glob("*.key"), *(folder / "run").glob("*.token")]:
        try:
            with place.open("rb") as file:
                text = file.read(SECRET_FILE_BYTES).decode(errors="replace").strip()
        except OSError:  # not there, or not ours to read: then its content is not ours to tell either
            continue
        found |= {line.strip() for line in text.splitlines()} | set(_passwords(text))
    return {secret for secret in found if secret}


def _passwords(text: str) -> list[str]:
    """The password of a URL, as it stands there and decoded."""
    try:
        given = urlsplit(text).password
    except ValueError:
        return []
    return [given, unquote(given)] if given else []
