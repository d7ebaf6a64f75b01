"""Strict JSON: what is accepted can be written again and read by anyone, and everything else says what is wrong."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.strict_json import MAX_DEPTH, loads, loads_object

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(values)
def test_json_means_what_it_says(value: Any):
    assert loads(json.dumps(value)) == value
    assert loads(b"\xef\xbb\xbf" + json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("NaN", "NaN is no JSON number"),
        ('{"a": [-Infinity]}', "-Infinity is no JSON number"),
        ("1e999", "beyond every number format"),
        ('{"a": 1, "b": {"c": 2, "c": 3}}', "the name 'c' stands twice"),
        (r'{"a": ["\ud800"]}', "half a surrogate pair"),
        (r'{"\udfff": 1}', "half a surrogate pair"),
        ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "deeper than 64"),
        ("[" * 200_000, "deeper than 64"),
        ('{"a":' * 100_000, "deeper than 64"),
        ("9" * 5000, "digits"),
        (b"\xff\xfe", "utf-8"),
        ("", "Expecting value"),
        ("{} {}", "Extra data"),
    ],
)
def test_what_others_would_read_otherwise_or_not_at_all_is_refused(text: str | bytes, says: str):
    with pytest.raises(ValueError, match=says):
        loads(text)


def test_the_deepest_that_is_accepted_can_be_written_again():
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH

    assert json.dumps(loads(text), indent=1).replace("\n", "").replace(" ", "") == text


@pytest.mark.parametrize(("text", "kind"), [("[]", "a list"), ("null", "null"), ("1", "a number"), ('"a"', "a string")])
def test_an_object_is_asked_for_by_name(text: str, kind: str):
    with pytest.raises(ValueError, match=f"it holds {kind}, not an object"):
        loads_object(text)


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_a_value_that_can_be_written_or_a_value_error(data: bytes):
    try:
        value = loads(data)
    except ValueError:
        return
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
