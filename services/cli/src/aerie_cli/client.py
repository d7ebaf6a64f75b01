"""The API as the command sees it: where it is, one call, typed errors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import httpx
import typer

from aerie_cli.exits import NotReachable
from eagle3_core.errors import AerieError, InvalidRequest

DEFAULT_DIR = Path(".aerie")
TIMEOUT_S = 60.0

Url = Annotated[
    str | None, typer.Option("--url", help="Where the API listens. Default: AERIE_URL, else the house in --dir.")
]
Dir = Annotated[Path, typer.Option("--dir", help="Folder of the embedded house.")]


class Damaged(AerieError):
    """A download is not what its manifest says."""

    code, status = "download.damaged", 502


def find_url(url: str | None, folder: Path) -> str:
    """The API's address: as given, from AERIE_URL, or from the house in `folder`. Raises NotReachable."""
    if found := url or os.environ.get("AERIE_URL"):
        return found.rstrip("/")
    place = folder / "run" / "server.json"
    try:
        return str(json.loads(place.read_text())["url"]).rstrip("/")
    except (OSError, ValueError, KeyError, TypeError):
        raise NotReachable(
            f"no API is running: neither --url nor AERIE_URL is given, and {place} does not say",
            remedy=f"start one with `aerie up --dir {folder}`, or name one with --url",
        ) from None


_PATH = re.compile(r"(/[A-Za-z0-9._:-]+)+")


class Api:
    """Calls to one API."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url, timeout=httpx.Timeout(TIMEOUT_S, connect=5.0), trust_env=False, transport=transport
        )

    def __enter__(self) -> Api:
        """Itself; the connections are closed at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        self._http.close()

    @classmethod
    def found(cls, url: str | None, folder: Path) -> Api:
        """The API that the options and the environment name. Raises NotReachable."""
        return cls(find_url(url, folder))

    def call(
        self, method: str, path: str, *, body: Any = None, query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:  # fmt: skip
        """One call's answer. Raises NotReachable, and what the API refuses as its AerieError."""
        if not _PATH.fullmatch(path) or ".." in path.split("/"):
            raise InvalidRequest(
                f"{path!r} names nothing of the API", remedy="give the job's id, as `aerie status` lists it"
            )
        given = {k: v for k, v in (query or {}).items() if v is not None}
        sent = dict(headers or {})
        content = None
        if body is not None:  # NaN travels too, so that it is refused where the field can be named
            content, sent["Content-Type"] = json.dumps(body, default=str).encode(), "application/json"
        try:
            response = self._http.request(method, path, content=content, params=given, headers=sent)
        except UnicodeError:
            raise InvalidRequest("a header holds what HTTP cannot carry", remedy="use plain letters in keys") from None
        except httpx.TransportError as error:
            raise NotReachable(f"{self.url} does not answer: {error}", remedy="start it with `aerie up`") from error
        if response.is_error:
            raise _refusal(response)
        return response

    def get(self, path: str, **query: Any) -> Any:
        """The document at `path`."""
        return self.call("GET", path, query=query).json()

    def post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """The answer to `body` at `path`."""
        return self.call("POST", path, body=body, headers=headers).json()

    def download(self, href: str) -> Iterator[bytes]:
        """The bytes at `href`, in pieces."""
        try:
            with self._http.stream("GET", href) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                yield from response.iter_bytes(1 << 20)
        except httpx.TransportError as error:
            raise NotReachable(f"{self.url} broke off: {error}", remedy="look at its log, and try again") from error


def _refusal(response: httpx.Response) -> AerieError:
    try:
        problem: dict[str, Any] = response.json()
    except ValueError:
        problem = {"detail": f"{response.url} answers {response.status_code}", "status": response.status_code}
    error = AerieError.from_problem(problem)
    if faults := problem.get("errors"):
        error.context["faults"] = faults
    return error
