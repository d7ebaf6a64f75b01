"""The document changes only when somebody has looked at the change."""

from __future__ import annotations

from pathlib import Path

from aerie_api.openapi import text

SNAPSHOT = Path(__file__).parents[3] / "docs" / "openapi.json"


def test_the_document_in_the_repository_is_the_one_that_is_served():
    assert SNAPSHOT.read_text() == text(), "look at the change, then run `make openapi`"
