"""HTTP as cheap as a client can have it: what is measured must be the service and not who asks.

httpx looks at every connection of its pool for every request: with the 700 that the fleet and the pollers hold, that took
longer than the service's answers. aiohttp does not.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


class Http:
    """Requests to one server, over as many connections as there are requests at once."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def get(
        self, path: str, headers: Mapping[str, str] | None = None, params: Mapping[str, Any] | None = None
    ) -> Answer:
        """The answer to a GET."""
        async with self._session.get(path, headers=headers, params=params) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """The answer to a POST of a JSON document, or of nothing."""
        async with self._session.post(path, json=body, headers=headers) as answer:
            return Answer(answer.status, answer.headers, await answer.read())


@asynccontextmanager
async def asking(url: str, timeout_s: float = 120) -> AsyncGenerator[Http]:
    """A client of the server at `url`."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(timeout_s)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        yield Http(session)
