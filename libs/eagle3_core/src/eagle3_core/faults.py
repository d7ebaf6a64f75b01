"""What is wrong with a document, in words for the person who wrote it.

A pointer says where a fault is, so the sentence does not repeat it. An unknown field is most often a typing error, so the
sentence names the known field that is nearest, where one is near.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, get_args

from pydantic import BaseModel

from eagle3_core.patterns import IN_WORDS
from eagle3_core.text import kind_of

NEAR = 0.7
"""Likeness (difflib) from which on a field may be the one that was meant: `epoch` is 0.91 like `epochs`, `url` 0.67 like
`uri` and so no longer; short names get one changed letter (`_near`)."""
SHOWN_CHARS = 40
"""Characters of an offending value that are quoted."""
WANTED = {
    "tuple": "a list", "list": "a list", "set": "a list", "frozen_set": "a list",
    "model": "an object", "model_attributes": "an object", "dict": "an object",
    "int": "a whole number", "float": "a number", "finite_number": "a finite number",
    "bool": "true or false", "string": "a string",
}  # fmt: skip
"""What a document must hold where pydantic asks for these, in JSON's words."""
_KIND = re.compile(r"_(type|parsing|parsing_size|from_float)$")
_HEAD = re.compile(r"^(Input|String|Value) should ")


def sentence(fault: Mapping[str, Any], model: type[BaseModel] | None = None) -> str:
    """One of `ValidationError.errors()` as a sentence that leaves out where it is. `model` read the document, if known."""
    kind, context, given = str(fault["type"]), fault.get("ctx") or {}, fault.get("input")
    if kind == "extra_forbidden":
        return _unknown(str(fault["loc"][-1]), _fields(model, fault["loc"][:-1]))
    if kind == "missing":
        last = fault["loc"][-1] if fault["loc"] else ""
        return f"the field {last!r} is missing" if isinstance(last, str) else "an entry is missing"
    if kind == "kinds":
        return f"must be {_either(context['wanted'])}, and is {_shown(given)}"
    if (wanted := _wanted(fault)) is not None:
        return f"must be {wanted}, and is {_shown(given)}"
    if kind == "string_pattern_mismatch" and (words := IN_WORDS.get(context["pattern"])) is not None:
        shown = "" if "@" in str(given) else f", and is {_shown(given)}"  # an address may hold a password
        return f"must be {words}{shown}"
    if kind == "too_short":
        return f"must have at least {_entries(context['min_length'])}, and has {context['actual_length']}"
    if kind == "too_long":
        return f"must have at most {_entries(context['max_length'])}"
    said = _HEAD.sub("must ", str(fault["msg"]).removeprefix("Value error, "))
    return f"{said}, and is {_shown(given)}" if kind == "literal_error" else said


def placed(fault: Mapping[str, Any], model: type[BaseModel] | None = None) -> str:
    """`sentence` with its place before it, for who gets no pointer."""
    place, said = ".".join(map(str, fault["loc"])), sentence(fault, model)
    return f"{place}: {said}" if place else said


def own_faults(errors: Sequence[Mapping[str, Any]], document: Any) -> list[Mapping[str, Any]]:
    """`ValidationError.errors()` as faults of `document`: each at a place that the document has, and none said twice.

    Two of pydantic's habits are undone. A list with a bad entry is called too short as well, because the entry was not
    counted. And where a value may be one of several kinds, every kind has its say, at a place that ends with the kind's name.
    """
    counted = [e for e in errors if e["type"] != "too_short" or len(e["input"]) < e["ctx"]["min_length"]]
    places = [_own_place(e, document) for e in counted]
    found = [({**e, "loc": place}, place != tuple(e["loc"])) for e, place in zip(counted, places, strict=True)]
    alternatives = [fault for fault, by_kind in found if by_kind]
    told: list[Mapping[str, Any]] = []
    for fault, by_kind in found:
        place = fault["loc"]
        if by_kind and _wanted(fault):
            beside = [other for other in alternatives if other["loc"][: len(place)] == place]
            if any(not _wanted(other) for other in beside) or beside[0] is not fault:
                continue  # the kind that fits says what else is wrong; or another kind spoke for all
            wanted = list(dict.fromkeys(filter(None, map(_wanted, beside))))
            fault = {**fault, "type": "kinds", "ctx": {"wanted": wanted}}
        told.append(fault)
    return told


def _own_place(fault: Mapping[str, Any], document: Any) -> tuple[str | int, ...]:
    """Where `fault` is, by steps that `document` has; the name of a missing field is the last step all the same."""
    steps: Sequence[str | int] = fault["loc"]
    if steps and isinstance(document, Mapping) and len(steps) > 1 and steps[0] not in document:
        return tuple(steps)  # a part of a request that is no document: query/limit
    place: list[str | int] = []
    here: Any = document
    for step in steps:
        if step in here if isinstance(here, Mapping) else isinstance(here, list) and step in range(len(here)):
            here = cast("Any", here)[step]
            place.append(step)
    return (*place, steps[-1]) if fault["type"] == "missing" else tuple(place)


def _wanted(fault: Mapping[str, Any]) -> str | None:
    """What kind of value `fault` asks for, if it is of the wrong kind."""
    return WANTED.get(_KIND.sub("", str(fault["type"])))


def headline(first: str, total: int) -> str:
    """The first of `total` faults, and how many there are besides."""
    return first if total < 2 else f"{first} (and {total - 1} more)"


def _unknown(name: str, fields: Sequence[str]) -> str:
    meant = _near(name, fields)
    return f"no field {name!r} here" + (f"; did you mean {meant!r}?" if meant else "")


def _near(name: str, fields: Sequence[str]) -> str | None:
    """The field that `name` is a slip of, if any is near: alike as a whole, or of three letters and off by one."""
    if close := difflib.get_close_matches(name.lower(), fields, n=1, cutoff=NEAR):
        return close[0]
    short = (f for f in fields if len(f) == len(name) <= 3 and sum(a != b for a, b in zip(f, name, strict=True)) == 1)
    return next(short, None)


def _fields(model: type[BaseModel] | None, place: Sequence[str | int]) -> list[str]:
    """Names of the fields that `place` may have in a document that `model` reads."""
    here = [model] if model is not None else []
    for step in place:
        found = [m.model_fields[step] for m in here if isinstance(step, str) and step in m.model_fields]
        if found:  # any other step is an entry of a list or one of several kinds, which are all looked at
            here = [part for field in found for part in _models(field.annotation)]
    return [name for one in here for name in one.model_fields]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a value of this type may be, or hold in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _either(wanted: Sequence[str]) -> str:
    """`true or false, a whole number or a string`."""
    return ", ".join(wanted[:-1]) + " or " * (len(wanted) > 1) + wanted[-1]


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _shown(value: Any) -> str:
    """A value as its document has it, unless it is long."""
    if isinstance(value, dict | list | tuple) or value is None:
        return "a list" if isinstance(value, tuple) else kind_of(value)
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARS else kind_of(value)
