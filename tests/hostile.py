"""Files that nobody should trust, for property tests: whole ones damaged anywhere, and headers made to deceive.

`damaged(whole)` changes bytes of a real file; `tensor_files(names)` writes a header from scratch that claims whatever
dtypes, shapes and places a liar might, over names that a reader looks for.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from eagle3_core.errors import AerieError

Result = TypeVar("Result")

DTYPES = ("BOOL", "U8", "I32", "I64", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F4", "U64", "C64", "F99")
WIDTH = {
    "BOOL": 1,
    "U8": 1,
    "I32": 4,
    "I64": 8,
    "BF16": 2,
    "F32": 4,
    "F64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U64": 8,
    "C64": 8,
}

odd_numbers = st.sampled_from((-1, 0, 1, 2, 3, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**30, 0.5, True, None, "7"))
odd_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6) | odd_numbers,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
"""Any JSON, and what Python calls JSON besides."""

odd_documents = st.sampled_from(
    (
        b"", b"null", b"[]", b"{", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\\ud800"}',
        b"[" * 100_000, b'{"a":' * 50_000, b'{"a": 1, "a": 2}', b"9" * 5000, b'{"\\u0000": "\\u001b[2J"}', b"\0" * 64,
    )
)  # fmt: skip
"""Documents that break readers of JSON."""


def outcome(act: Callable[[], Result]) -> tuple[Result | None, AerieError | None]:
    """What `act` gives, or the typed error that it raises; any other exception passes."""
    try:
        return act(), None
    except AerieError as error:
        return None, error


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with one to four faults: bytes changed, cut off, doubled, put in or taken out, most of them near the front."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        near = st.integers(0, min(len(data), 700))
        at = draw(near | st.integers(0, len(data)))
        kind = draw(st.sampled_from(("flip", "cut", "insert", "delete", "double", "digits")))
        if kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=9))
        elif kind == "delete":
            del data[at : at + draw(st.integers(1, 9))]
        elif kind == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 40))]
        elif kind == "digits" and any(48 <= byte < 58 for byte in data[at:]):
            place = next(i for i in range(at, len(data)) if 48 <= data[i] < 58)
            data[place] = draw(st.integers(48, 57))
        elif data:
            data[at % len(data)] ^= draw(st.integers(1, 255))
    return bytes(data)


@st.composite
def _entry(draw: st.DrawFn, at: int) -> tuple[Any, int]:
    """A tensor's entry that may lie, and how many bytes a true one takes."""
    dtype = draw(st.sampled_from(DTYPES))
    shape: list[Any] = draw(st.lists(st.integers(0, 4), max_size=3))
    size = WIDTH.get(dtype, 1)
    for count in shape:
        size *= count
    entry: Any = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
    match draw(st.sampled_from(("true",) * 6 + ("shape", "offsets", "dtype", "whole", "more"))):
        case "shape":
            entry["shape"] = draw(st.lists(odd_numbers, max_size=4) | odd_values)
        case "offsets":
            entry["data_offsets"] = draw(st.lists(odd_numbers, min_size=2, max_size=2) | odd_values)
        case "dtype":
            entry["dtype"] = draw(odd_values)
        case "whole":
            entry = draw(odd_values)
        case "more":
            entry["more"] = draw(odd_values)
        case _:
            pass
    return entry, size


@st.composite
def tensor_files(draw: st.DrawFn, names: Sequence[str] = ("a", "b", "c"), metadata: str = "shard") -> bytes:
    """A file with a header of its own: some tensors called `names`, metadata under `metadata`, and some bytes after it."""
    header: dict[str, Any] = {}
    at = 0
    for name in draw(st.lists(st.sampled_from(names), unique=True, max_size=len(names))):
        header[name], size = draw(_entry(at))
        at += size
    if draw(st.booleans()):
        inner = draw(odd_values.map(json.dumps) | odd_documents.map(lambda raw: raw[:4000].decode("latin-1")))
        header["__metadata__"] = draw(st.sampled_from(({metadata: inner}, {metadata: 3}, [], None)))
    raw = json.dumps(header).encode() + b" " * draw(st.integers(0, 3))
    length = draw(st.just(len(raw)) | st.sampled_from((0, 1, len(raw) + 1, 1 << 40, (1 << 64) - 1)))
    body = bytes(at + draw(st.sampled_from((0, 0, 0, 1, 8)))) if at < 4096 else b""
    return struct.pack("<Q", length) + raw + body
