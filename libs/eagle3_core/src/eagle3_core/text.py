"""Text that can be stored, sent and read by people, whatever it was made of."""

from __future__ import annotations

from typing import Any, cast


def sayable(value: Any) -> Any:
    """`value` with every string made storable: half surrogate pairs, which tokenizers and file names can make, and NUL,
    which Postgres cannot hold, become `?`."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode().replace("\0", "?")
    if isinstance(value, dict):
        return {sayable(key): sayable(part) for key, part in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [sayable(part) for part in cast("list[Any]", value)]
    return value


def is_text(value: str) -> bool:
    """Whether `value` can be sent and stored: half a surrogate pair, which JSON and tokenizers can make, is no text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_of(value: Any) -> str:
    """What `value` is in JSON's words."""
    words = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return words.get(type(value), "a number")


def pace(per_s: float) -> str:
    """A rate for people: below 10 with one decimal, because 0.4 is not 0."""
    return f"{per_s:.1f}" if per_s < 10 else f"{per_s:.0f}"
