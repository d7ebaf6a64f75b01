"""JSON that strangers wrote, read strictly: what this accepts, every other reader accepts and means the same by.

Python's reader takes more than JSON: NaN, infinities (also as 1e999), half surrogate pairs, the last of several equal
names. Each of them breaks somebody later: a digest, a database, a terminal, a program that reads our own output. And what
it nests deeply it can read but not write again. All of it is refused here, where the file is still known.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)

MAX_DEPTH = 64
"""Objects and lists inside one another. Configs, headers and jobs have six at most."""


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
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else str(first["msg"])) from None


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


def kind_of(value: Any) -> str:
    """What `value` is in JSON's words."""
    words = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return words.get(type(value), "a number")


def _encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text[:40]!r} holds half a surrogate pair, which is no text") from None


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
