"""Reads JSON of unknown origin strictly: what this accepts, every other reader accepts too and understands in the same way.

Python's reader takes more than JSON: NaN, infinities (also as 1e999), half surrogate pairs, the last of several equal names;
and it reads nesting so deep that it cannot be written again. Each of these breaks something later: a digest, a database, a
terminal, a program that reads our own output. All of it is refused here, where it is still known which file it came from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from eagle3_core.errors import json_pointer
from eagle3_core.faults import placed
from eagle3_core.text import is_text, kind_of

Model = TypeVar("Model", bound=BaseModel)

MAX_DEPTH = 64
"""Objects and lists inside one another. Configs, headers and jobs have six at most."""


class Twice(ValueError):
    """A name stands twice in one object: what a reader takes of it depends on the reader."""

    def __init__(self, name: str, pointer: str) -> None:
        super().__init__(f"the name {name[:40]!r} stands twice in one object")
        self.pointer = pointer
        """JSON pointer of the field."""


def loads_once(data: bytes | str) -> Any:
    """The value of `data` as `json.loads` reads it, NaN and all, but every name once. Raises ValueError, Twice."""
    doubled: dict[int, tuple[dict[str, Any], str]] = {}

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            doubled[id(found)] = found, next(name for i, name in enumerate(names) if name in names[:i])
        return found

    value = json.loads(data, object_pairs_hook=once)
    if doubled:
        raise _twice(value, doubled)
    return value


def _twice(value: Any, doubled: dict[int, tuple[dict[str, Any], str]]) -> Twice:
    """The error for the outermost of the objects `doubled` (by `id`) that `value` holds."""
    level: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while True:  # what a later twin replaced is not reached, but then that twin's object is
        for steps, part in level:
            if id(part) in doubled:
                name = doubled[id(part)][1]
                return Twice(name, json_pointer((*steps, name)))
        level = [((*steps, key), inner) for steps, part in level for key, inner in _parts(part)]


def _parts(value: Any) -> Iterable[tuple[str | int, Any]]:
    """The members of an object or list with their names or places."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def loads(data: bytes | str) -> Any:
    """The value that `data` (UTF-8, a byte-order mark is skipped) holds. Raises ValueError that says what is wrong."""
    text = data.decode("utf-8-sig") if isinstance(data, bytes) else data.removeprefix("\ufeff")
    try:
        value = json.loads(text, parse_constant=_constant, parse_float=_float, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"it nests deeper than {MAX_DEPTH} levels") from None
    check(value)
    return value


def loads_object(data: bytes | str) -> dict[str, Any]:
    """The JSON object that `data` holds. Raises ValueError that says what is wrong."""
    value = loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"it holds {kind_of(value)}, not an object")
    return value


def parse_model(kind: type[Model], data: bytes | str) -> Model:
    """The JSON `data` as a `kind`. Raises ValueError that says in one line where it is not one."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(placed(error.errors()[0], kind)) from None


def check(value: Any) -> None:
    """Raise ValueError unless `value` nests at most MAX_DEPTH levels and all its text can be written as UTF-8."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                deeper.extend(part)
                deeper.extend(part.values())
            elif isinstance(part, list):
                deeper.extend(part)
            elif isinstance(part, str):
                _encodable(part)
        level = deeper
        if not level:
            return
    raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")


def _encodable(text: str) -> None:
    if not is_text(text):
        raise ValueError(f"{text[:40]!r} holds half a surrogate pair, which is no text")


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond every number format")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name[:40]!r} stands twice in one object")
        found[name] = value
    return found
