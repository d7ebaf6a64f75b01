"""The API as the command sees it: its address, one call, typed errors.

Whatever answers at an address, the command ends with a message and not a traceback: a malformed address is refused before
anything is sent, and an answer that is not Aerie's is reported as such. A document is accepted only if its field `object`
says that it is of the expected kind.
"""

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

from aerie_cli.exits import NotOurs
from eagle3_core import strict_json
from eagle3_core.addresses import require_encrypted
from eagle3_core.errors import AerieError, InvalidRequest
from eagle3_core.jobs.refusals import Unreachable

DEFAULT_DIR = Path(".aerie")
TIMEOUT_S = 60.0

Url = Annotated[
    str | None, typer.Option("--url", help="Where the API listens. Default: AERIE_URL, else the house in --dir.")
]
Dir = Annotated[Path, typer.Option("--dir", help="Folder of the embedded house.")]


class BadUrl(AerieError):
    """The address of the API is no address."""

    code, status = "api.url", 422


class BadKeyFile(AerieError):
    """The file of the API key cannot be read."""

    code, status = "api.key_file", 422


class Damaged(AerieError):
    """A download is not what its manifest says."""

    code, status = "download.damaged", 502


def find_url(url: str | None, folder: Path) -> str:
    """The API's address: as given, from AERIE_URL, or from the house in `folder`. Raises Unreachable, BadUrl."""
    if url is not None:
        return checked_url(url, "--url")
    if found := os.environ.get("AERIE_URL"):
        return checked_url(found, "AERIE_URL")
    place = folder / "run" / "server.json"
    if (stated := _stated_url(folder)) is None:
        raise Unreachable(
            f"no API is running: neither --url nor AERIE_URL is given, and {place} does not say",
            remedy=f"start one with `aerie up --dir {folder}`, or name one with --url",
        )
    return checked_url(stated, str(place))


def _stated_url(folder: Path) -> str | None:
    """Where the house in `folder` says that it listens."""
    try:
        with (folder / "run" / "server.json").open("rb") as file:
            return str(strict_json.loads_object(file.read(65536))["url"])
    except (OSError, ValueError, KeyError):
        return None


def find_key(url: str, folder: Path) -> str | None:
    """The API key for `url`: AERIE_API_KEY, the content of AERIE_API_KEY_FILE, or, where `url` is the house in `folder`, its
    first admin key, which is sent nowhere else. Never an argument: arguments can be read by everybody on the machine.

    Raises BadKeyFile.
    """
    if given := os.environ.get("AERIE_API_KEY", "").strip():
        return given
    if not (named := os.environ.get("AERIE_API_KEY_FILE")):
        return house_key(folder) if url == _stated_url(folder) else None
    try:
        return Path(named).read_text().strip() or None
    except (OSError, ValueError) as error:
        raise BadKeyFile(
            f"AERIE_API_KEY_FILE is {named}: {error}", remedy="name a file that holds an API key"
        ) from None


def house_key(folder: Path) -> str | None:
    """The first admin key of the house in `folder`, if it asks for keys. Raises BadKeyFile."""
    place = folder / "run" / "admin.key"
    try:
        return place.read_text().strip() or None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BadKeyFile(f"{place}: {error}", remedy="let AERIE_API_KEY_FILE name a key that you may read") from None


def check_transport(url: str, key: str | None) -> None:
    """Raise PlainHttpRefused where `key` would cross a network in clear text and nobody said that something encrypts it."""
    if key is not None:
        require_encrypted(str(httpx.URL(url)), "the API key", allowed=os.environ.get("AERIE_ALLOW_PLAIN_HTTP") == "1")


def checked_url(text: str, source: str) -> str:
    """`text` if it is the address of a server, without a slash at its end. Raises BadUrl that names `source`."""
    try:
        url = httpx.URL(text)
        port = url.port  # not looked at before it is asked for
        fault = (
            f"its scheme is {url.scheme!r}" if url.scheme not in ("http", "https")
            else "it names no host" if not url.host
            else f"its port is {port}" if port is not None and not 0 < port < 65536
            else "it carries a query or a fragment" if url.query or url.fragment
            else "it holds spaces or control characters" if re.search(r"[\x00-\x20\x7f-\xa0]", text)
            else ""
        )  # fmt: skip
    except (httpx.InvalidURL, ValueError) as error:  # UnicodeError, of names that cannot be, is a ValueError
        fault = str(error)
    if fault:
        raise BadUrl(f"{source} is {text!r}: {fault}", remedy="give it as http://HOST:PORT, as `aerie up` prints it")
    return text.rstrip("/")


_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def job_path(job_id: str, *rest: str) -> str:
    """The path of a job, or of what belongs to it. Raises InvalidRequest where `job_id` is no id."""
    if not _ID.fullmatch(job_id):
        raise InvalidRequest(f"{job_id!r} is no id of a job", remedy="give the job's id, as `aerie status` lists it")
    return "/".join(("/jobs", job_id, *rest))


class Api:
    """Calls to one API."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None, key: str | None = None) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url, timeout=httpx.Timeout(TIMEOUT_S, connect=5.0), trust_env=False, transport=transport,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
        )  # fmt: skip

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
        """The API that the options and the environment name. Raises Unreachable, BadUrl, BadKeyFile, PlainHttpRefused."""
        place = find_url(url, folder)
        key = find_key(place, folder)
        check_transport(place, key)
        return cls(place, key=key)

    def call(
        self, method: str, path: str, *, body: Any = None, query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:  # fmt: skip
        """One call's answer. Raises Unreachable, and what the API refuses as its AerieError."""
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
            raise self._away(error) from error
        except httpx.DecodingError as error:
            raise self._foreign(str(error)) from error
        if response.is_error:
            raise self._refusal(response)
        return response

    def get(self, path: str, kind: str = "job", **query: Any) -> dict[str, Any]:
        """The document at `path`, which calls itself a `kind`. Raises NotOurs for anything else."""
        return self.read(self.call("GET", path, query=query), kind)

    def post(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, kind: str = "job"
    ) -> dict[str, Any]:
        """The answer to `body` at `path`, which calls itself a `kind`. Raises NotOurs for anything else."""
        return self.read(self.call("POST", path, body=body, headers=headers), kind)

    def all(self, path: str, **query: Any) -> list[dict[str, Any]]:
        """Every entry of a list that is numbered by `seq`, page after page."""
        page = self.get(path, "list", **query)
        entries: list[dict[str, Any]] = page["data"]
        while page["has_more"] and page["data"]:
            page = self.get(path, "list", **{**query, "after": page["last_seq"]})
            entries += page["data"]
        return entries

    def read(self, response: httpx.Response, kind: str) -> dict[str, Any]:
        """The document in `response`. Raises NotOurs where it is not a `kind` of Aerie's API."""
        try:
            answer = strict_json.loads_object(response.content)
        except ValueError as error:
            raise self._foreign(f"{response.request.url.path} answers {response.status_code}, and {error}") from None
        if answer.get("object") != kind:
            raise self._foreign(f"{response.request.url.path} answers with an object that is no {kind}")
        return answer

    def download(self, href: str) -> Iterator[bytes]:
        """The bytes at `href`, a path of this API, in pieces. Raises Damaged where `href` leads elsewhere."""
        if not href.startswith("/") or href.startswith("//"):
            raise Damaged(f"the API sends to {href!r} for a file", remedy="do not trust this API")
        try:
            with self._http.stream("GET", href) as response:
                if response.is_error:
                    response.read()
                    raise self._refusal(response)
                yield from response.iter_bytes(1 << 20)
        except httpx.TransportError as error:
            raise Unreachable(f"{self.url} broke off: {error}", remedy="look at its log, and try again") from error

    def _refusal(self, response: httpx.Response) -> AerieError:
        try:
            problem = strict_json.loads_object(response.content)
        except ValueError:
            problem = {}
        if not isinstance(problem.get("code"), str):
            if response.status_code in (502, 503, 504):  # a proxy's, whose API is away
                return self._away(f"a proxy answers {response.status_code}")
            return self._foreign(f"{response.request.url.path} answers {response.status_code} without a code of ours")
        return AerieError.from_problem(problem)

    def _away(self, why: object) -> Unreachable:
        return Unreachable(
            f"{self.url} does not answer: {str(why) or type(why).__name__}", remedy="start it with `aerie up`"
        )

    def _foreign(self, what: str) -> NotOurs:
        return NotOurs(
            f"what answers at {self.url} is not Aerie's API: {what}",
            remedy="correct the address, or update this command",
        )
