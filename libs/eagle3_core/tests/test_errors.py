"""Errors print themselves the same everywhere, and survive the trip through a problem document."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.errors import AerieError, InvalidRequest, RemoteError, error_types
from eagle3_core.objects.protocol import StoreFull


def test_a_problem_document_carries_code_status_remedy_and_field():
    doc = InvalidRequest("epochs is 0", remedy="use 1 or more", pointer="/training/epochs").problem("/jobs")

    assert doc["code"] == "request.invalid"
    assert doc["status"] == 422
    assert doc["remedy"] == "use 1 or more"
    assert doc["errors"] == [{"pointer": "/training/epochs", "detail": "epochs is 0"}]
    assert doc["instance"] == "/jobs"


def test_an_error_comes_back_from_its_problem_document_as_the_same_type():
    error = StoreFull("no room", remedy="free some", needed=12)

    back = AerieError.from_problem(error.problem())

    assert type(back) is StoreFull
    assert (back.detail, back.remedy, back.context) == ("no room", "free some", {"needed": 12})


def test_an_unknown_code_keeps_its_code_and_status():
    back = AerieError.from_problem({"code": "from.the.future", "status": 418, "detail": "later"})

    assert isinstance(back, RemoteError)
    assert (back.code, back.status, back.detail) == ("from.the.future", 418, "later")
    assert RemoteError.code == "remote"


def test_an_error_from_another_process_keeps_what_that_process_said_of_it():
    document = {
        "type": "urn:aerie:problem:server.address", "title": "The address cannot be listened on.", "status": 409,
        "detail": "port 80 is taken", "code": "server.address", "remedy": "free it",
    }  # fmt: skip

    assert AerieError.from_problem(document).problem() == document


def test_every_offending_field_survives_the_trip():
    faults = [{"pointer": "/a", "detail": "odd"}, {"pointer": "/b", "detail": "odder"}]

    back = AerieError.from_problem(InvalidRequest("a: odd", pointer="/a", faults=faults, job="j").problem())

    assert back.pointer == "/a"
    assert back.problem()["errors"] == faults
    assert back.problem()["context"] == {"job": "j"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
members = st.sampled_from(("type", "title", "status", "detail", "code", "remedy", "errors", "context", "pointer"))


@given(st.dictionaries(members | st.text(max_size=4), json_values, max_size=8))
def test_whatever_calls_itself_a_problem_becomes_an_error_that_prints_itself(document: dict[str, Any]):
    error = AerieError.from_problem(document)

    assert 400 <= error.status <= 599
    assert error.problem()["title"]
    assert error.text()


def test_terminal_text_names_the_code_the_field_and_the_remedy():
    text = InvalidRequest("lr is NaN", remedy="give a number", pointer="/training/lr").text()

    assert text == "error request.invalid (at /training/lr): lr is NaN\n  remedy: give a number"


def test_every_code_belongs_to_one_type_with_a_first_line_that_serves_as_title():
    ours = [kind for kind in error_types() if kind.__module__.startswith("eagle3_core") and "code" in vars(kind)]

    assert len({kind.code for kind in ours}) == len(ours) > 2
    assert all((kind.__doc__ or "").strip() for kind in ours)
