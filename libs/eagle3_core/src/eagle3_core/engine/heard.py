"""Cleans what a server said before any other module sees it: the key is removed, the kind is checked, the length is cut.

A server is somebody else's program: it may repeat the key, send something that is no answer, or send more than anyone can
store. The key is removed before anything is cut, since half a key is still a secret.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard
from urllib.parse import quote

from eagle3_core.errors import AerieError
from eagle3_core.telemetry.secrets import HIDDEN, hide_in

MOST_CHARS = 500
"""Longest piece of a server's words in an error."""
MOST_DEPTH = 64
"""Deepest nesting of an answer; SGLang's own go down by six."""
MOST_COUNT = (1 << 31) - 1
"""Largest number of tokens, and largest token id, that an answer may hold: both are stored as 32-bit numbers."""
_LONGEST = 1 << 16
"""Characters that are looked through for secrets of other kinds: far more than are shown."""


class AnswerWrong(AerieError):
    """A server's answer is none to what was asked, or says too little."""

    code, status = "endpoint.answer", 502


def cut(said: Any, most: int = MOST_CHARS) -> str:
    """`said` by a server, short enough for an error."""
    text = said if isinstance(said, str) else repr(said)
    return text if len(text) <= most else text[:most] + "..."


@dataclass(frozen=True)
class Ear:
    """Hears one server, which may have been shown `key`."""

    key: str = ""

    @property
    def _secrets(self) -> tuple[str, ...]:
        """The key in the ways in which programs write texts down."""
        key = self.key
        forms = {key, quote(key, safe=""), json.dumps(key)[1:-1], repr(key)[1:-1], b64encode(key.encode()).decode()}
        return tuple(sorted(forms, key=len, reverse=True)) if key else ()

    def text(self, said: bytes | str, most: int = MOST_CHARS) -> str:
        """`said` as words for an error."""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        return cut(hide_in(self._without(text)[:_LONGEST]), most)

    def document(self, said: bytes | str) -> dict[str, Any]:
        """The JSON object that `said` is. Raises ValueError for everything else."""
        try:
            found = self._clean(json.loads(said), 0)
        except RecursionError:
            raise ValueError(f"JSON that is nested deeper than {MOST_DEPTH}") from None
        if not isinstance(found, dict):
            raise ValueError("JSON that is no object")
        return found

    def _clean(self, value: Any, depth: int) -> Any:
        if depth > MOST_DEPTH:
            raise ValueError(f"JSON that is nested deeper than {MOST_DEPTH}")
        if isinstance(value, str):
            return self._without(value)
        if isinstance(value, dict):
            return {self._without(name): self._clean(part, depth + 1) for name, part in value.items()}
        if isinstance(value, list) and any(isinstance(part, str | dict | list) for part in value):
            return [self._clean(part, depth + 1) for part in value]
        return value

    def _without(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text


def part(document: Any, name: str, kind: type) -> Any:
    """What `document` holds under `name`. Raises AnswerWrong unless it is of that kind."""
    found = document.get(name) if isinstance(document, dict) else None
    if not isinstance(found, kind):
        raise wrong(f"no {name}" if found is None else f"{name} that is {cut(found, 40)}")
    return found


def part_or(document: Any, name: str, default: Any) -> Any:
    """As `part` of the kind of `default`, which stands for what is left out or null."""
    given = isinstance(document, dict) and document.get(name) is not None
    return part(document, name, type(default)) if given else default


def count(said: Any, name: str) -> int | None:
    """A number of things; None where `said` holds none. Raises AnswerWrong for one that cannot be."""
    value = said.get(name) if isinstance(said, dict) else None
    if value is None:
        return None
    if not is_count(value):
        raise wrong(f"{name} that is {cut(value, 40)}")
    return value


def is_count(value: Any) -> TypeGuard[int]:
    """Whether `value` can be a number of tokens, or a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT


def token_ids(value: Any, name: str) -> list[int] | None:
    """A list of token ids; None where there is none. Raises AnswerWrong."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(is_count(token) for token in value):
        raise wrong(f"{name} that are no token ids")
    return value


def wrong(what: str) -> AnswerWrong:
    """The error for an answer that has `what`."""
    return AnswerWrong(
        f"the server's answer has {what}",
        remedy="name a server of vLLM or SGLang, with the `api` that it speaks; see docs/endpoints.md",
    )


@contextmanager
def naming(url: str) -> Generator[None]:
    """Errors of the block name the server at `url`, whoever found them."""
    try:
        yield
    except AerieError as error:
        if url not in error.detail:
            error.detail = f"{url}: {error.detail}"
            error.args = (error.detail,)
        raise
