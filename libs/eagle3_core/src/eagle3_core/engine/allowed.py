"""Which running servers a job may name, and the keys that open them: settings of the operator.

A job is posted by somebody who could otherwise have this machine speak to any other one that it reaches. So the operator
lists addresses, private and public ones alike, and a job must name one of them to the letter. A key is the
operator's too: a job knows its name, the setting says which file holds it, which server may be shown it, and whose
jobs may use it. The key is read when it is needed, so that a renewed one is taken up, and goes nowhere else.

    AERIE_ENDPOINTS       servers that jobs may name in `verifier.endpoint` and `extraction.endpoint`, separated by spaces
    AERIE_ENDPOINT_KEYS   a JSON object: {NAME: {"file": PATH, "endpoint": URL, "tenants": [TENANT, ...]}}; without `tenants`
                          everyone's jobs may use it
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from eagle3_core import strict_json
from eagle3_core.addresses import require_encrypted
from eagle3_core.engine.client import Client
from eagle3_core.engine.config import EngineConfig
from eagle3_core.engine.refusals import EndpointDown
from eagle3_core.engine.settings import BadEngineSettings
from eagle3_core.errors import AerieError
from eagle3_core.jobs.spec import JobSpec, ServerAddress

ANSWERS_AT, STATES_AT = "/verifier/endpoint", "/extraction/endpoint"
"""Where a job names the servers that write its answers and give its states."""

LEAST_KEY_CHARS = 16
"""A shorter key is guessed, and hiding it would hide words."""


class EndpointNotAllowed(AerieError):
    """The job names a server that the operator does not list."""

    code, status = "engine.endpoint", 422


class EndpointKeyRefused(AerieError):
    """The job names a key that is not for it, or that cannot be had."""

    code, status = "endpoint.key", 422


class EndpointKey(EngineConfig):
    """Where a key lies, and what it is for."""

    file: Path
    endpoint: str
    """The one server that may be shown it."""
    tenants: tuple[str, ...] | None = None
    """Whose jobs may use it; null = everyone's."""


class Allowed(EngineConfig):
    """What the operator allows."""

    urls: tuple[str, ...] = ()
    keys: dict[str, EndpointKey] = Field(default_factory=dict)
    plain_http: bool = False
    """Whether something else encrypts what is sent over plain http."""

    def client(self, server: ServerAddress, tenant: str, pointer: str) -> Client:
        """Speaks to `server`, which the job of `tenant` names at the JSON pointer `pointer`.

        Raises EndpointNotAllowed, EndpointKeyRefused, PlainHttpRefused. Nothing is sent yet.
        """
        if (url := server.url.rstrip("/")) not in self.urls:
            raise EndpointNotAllowed(
                f"{server.url} is none of the servers that the operator lists",  # which these are is no tenant's to know
                remedy=f"have the operator list it in AERIE_ENDPOINTS, or leave {pointer[1:].replace('/', '.')} out",
                pointer=f"{pointer}/url",
            )
        key = "" if server.key is None else self._key(server.key, url, tenant, f"{pointer}/key")
        base = url.removesuffix("/v1")  # OpenAI's clients are given it, and it begins their paths
        return Client(base, server.timeout_s, key=key, failed=EndpointDown)

    def _key(self, name: str, url: str, tenant: str, pointer: str) -> str:
        """The key of that name. Other tenants' keys are not told from those that do not exist."""
        held = self.keys.get(name)
        if held is None or (held.tenants is not None and tenant not in held.tenants):
            raise EndpointKeyRefused(
                f"the operator gives no key named {name} for jobs of {tenant}",
                remedy="have the operator add it to AERIE_ENDPOINT_KEYS, or name another one",
                pointer=pointer,
            )
        if held.endpoint.rstrip("/") != url:
            raise EndpointKeyRefused(
                f"the key {name} is for another server than {url}",
                remedy="name the key of this server, or leave the key out",
                pointer=pointer,
            )
        require_encrypted(url, f"the key {name}", allowed=self.plain_http)
        return _content(name, held.file, pointer)


def endpoints_of(spec: JobSpec) -> list[tuple[ServerAddress, str]]:
    """The servers that a job names, each with its JSON pointer."""
    named = [(spec.verifier.endpoint, ANSWERS_AT), (spec.extraction.endpoint, STATES_AT)]
    return [(server, pointer) for server, pointer in named if server is not None]


def read_allowed(environment: Mapping[str, str] = os.environ) -> Allowed:
    """The settings in `environment`. Raises BadEngineSettings that names the variable."""
    return Allowed(
        urls=_urls(environment.get("AERIE_ENDPOINTS", "")),
        keys=_keys(environment.get("AERIE_ENDPOINT_KEYS", "")),
        plain_http=environment.get("AERIE_ALLOW_PLAIN_HTTP") == "1",
    )


def _urls(text: str) -> tuple[str, ...]:
    """The addresses in a setting. What is wrong with one is said by its place: the error is a tenant's to read."""
    urls = tuple(url.rstrip("/") for url in text.split())
    for place, url in enumerate(urls, 1):
        if (fault := _fault(url)) is not None:
            raise BadEngineSettings(
                f"AERIE_ENDPOINTS: address {place} {fault}",
                remedy="set it to addresses like https://host:port, separated by spaces; a key goes into AERIE_ENDPOINT_KEYS",
            )
    return urls


def _fault(url: str) -> str | None:
    """What keeps `url` from being a server's plain address; None where nothing does."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "has a port, or brackets, that cannot be"
    if "@" in parts.netloc:
        return "holds a name or a password"
    if parts.scheme not in ("http", "https") or not parts.hostname or "?" in url or "#" in url or "," in url:
        return "is no https://host:port"
    return "has port 0" if port == 0 else None


def _keys(text: str) -> dict[str, EndpointKey]:
    try:
        stated: Mapping[str, Any] = strict_json.loads_object(text.encode()) if text.strip() else {}
        return {name: EndpointKey.model_validate(entry) for name, entry in stated.items()}
    except ValidationError as error:
        what = f"{'.'.join(map(str, error.errors()[0]['loc'])) or 'an entry'}: {error.errors()[0]['msg']}"
    except ValueError as error:
        what = str(error)
    raise BadEngineSettings(
        f"AERIE_ENDPOINT_KEYS: {what}", remedy='set it to {NAME: {"file": PATH, "endpoint": URL}}, or unset it'
    )


def _content(name: str, file: Path, pointer: str) -> str:
    remedy = "have the operator put the key into that file, alone on one line, readable by the workers"
    try:
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it holds more than ASCII"
        raise EndpointKeyRefused(
            f"the file of the key {name} cannot be read: {why}", remedy=remedy, pointer=pointer
        ) from None
    if not key or not key.isprintable():
        raise EndpointKeyRefused(f"the file of the key {name} holds no key", remedy=remedy, pointer=pointer)
    if len(key) < LEAST_KEY_CHARS:
        raise EndpointKeyRefused(
            f"the file of the key {name} holds one of fewer than {LEAST_KEY_CHARS} characters",
            remedy="have the operator give the server a longer one: a short key could not be told from words in what it says",
            pointer=pointer,
        )
    return key
