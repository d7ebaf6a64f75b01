"""The table of a safetensors file is what safetensors' own reader says it is; no bytes make it fail in another way."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hostile import damaged, odd_documents, tensor_files
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from eagle3_core.tensor_table import BITS, Entry, read_table

WHOLE = save({"a": np.arange(6, dtype=np.int64).reshape(2, 3), "b": np.ones(3, np.uint8)}, {"note": "x", "more": "y"})


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tables") / "x.safetensors"


def theirs(path: Path) -> tuple[dict[str, list[int]], dict[str, str]] | None:
    """Shapes and metadata by safetensors' own reader, None where it refuses the file."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError):
        return None


def test_names_shapes_places_and_metadata_are_read(place):
    place.write_bytes(WHOLE)

    table = read_table(place)

    assert {name: (e.dtype, e.shape) for name, e in table.entries.items()} == {"a": ("I64", (2, 3)), "b": ("U8", (3,))}
    assert WHOLE[slice(table.entries["b"].start, table.entries["b"].stop)] == b"\1\1\1"
    assert table.metadata == {"note": "x", "more": "y"}


@given(data=tensor_files() | damaged(WHOLE) | st.binary(max_size=60) | odd_documents)
@example(data=struct.pack("<Q", 2) + b"{}")
def test_a_table_is_given_only_where_the_formats_own_reader_agrees(place, data):
    place.write_bytes(data)

    try:
        table = read_table(place)
    except ValueError:
        return
    assert theirs(place) == ({name: list(entry.shape) for name, entry in table.entries.items()}, dict(table.metadata))


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_takes_as_many_bytes_as_the_format_says(place, dtype):
    size = BITS[dtype]  # eight elements
    header = json.dumps({"a": {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, size]}}).encode()
    place.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))

    assert theirs(place) == ({"a": [2, 4]}, {})
    assert read_table(place).entries["a"] == Entry(dtype, (2, 4), 8 + len(header), 8 + len(header) + size)


def file_of(header: object, body: bytes = b"") -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + body


def byte_at(*offsets: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [1], "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "0 bytes, too few"),
        (struct.pack("<Q", 1 << 63), "too few for its header"),
        (file_of([]), "a list, not an object"),
        (file_of({"a": byte_at(0, 1)}), "the file is truncated"),
        (file_of({"a": byte_at(0, 1)}, b"xy"), "belongs to no tensor"),
        (file_of({"a": byte_at(1, 2)}, b"xy"), "tensor a begins at byte"),
        (file_of({"a": byte_at(0, 1), "b": byte_at(0, 1)}, b"x"), "tensor b begins at byte"),
        (file_of({"a": byte_at(-1, 0)}), "tensor a lies at"),
        (file_of({"a": {"dtype": "U8", "shape": [1 << 62, 8], "data_offsets": [0, 0]}}), "no memory holds"),
        (file_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"xxxx"), "takes 8 bytes, its place has 4"),
        (file_of({"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, b"xxxx"), "dtype F31"),
        (file_of({"a": 7}), "dtype None"),
        (file_of({"__metadata__": {"a": 1}}), "not a map of strings"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(place, data, says):
    place.write_bytes(data)

    with pytest.raises(ValueError, match=says):
        read_table(place)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")

    for name, says in (("pipe", "no file"), (".", "no file"), ("nowhere", "not exist")):
        with pytest.raises(ValueError, match=says):
            read_table(tmp_path / name)
