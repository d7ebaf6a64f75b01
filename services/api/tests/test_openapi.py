"""The API does what its OpenAPI document says, and the document changes only when somebody has looked at the change."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from aerie_api.openapi import text

SNAPSHOT = Path(__file__).parents[3] / "docs" / "openapi.json"
NUMBERS = count()
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def test_the_document_in_the_repository_is_the_one_that_is_served():
    assert SNAPSHOT.read_text() == text(), "look at the change, then run `make openapi`"


@pytest.fixture
def described(make_api):
    """The document of an API with one job in it; whatever is sent to that API comes from the document alone."""
    api = make_api(f"described{next(NUMBERS)}")  # it is asked for once for the document, and once for each operation
    api.post()
    return schemathesis.openapi.from_asgi("/openapi.json", api.app)


schema = schemathesis.pytest.from_fixture("described")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@schema.parametrize()
@settings(max_examples=4, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_operation_answers_as_it_is_described(database, case):
    case.call_and_validate(checks=CHECKS)
