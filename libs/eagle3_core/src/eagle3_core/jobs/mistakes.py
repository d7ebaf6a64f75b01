"""Everything that is wrong with a job, told at once: who mends one field hears of the next one in the same answer."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from eagle3_core.errors import AerieError


class Mistakes:
    """The faults found so far, in order. What needs the part that failed is not looked at: `check` before it."""

    def __init__(self) -> None:
        self._found: list[AerieError] = []

    @contextmanager
    def noted(self) -> Generator[None]:
        """Note the AerieError that ends the block, and go on behind it."""
        try:
            yield
        except AerieError as error:
            self._found.append(error)

    def check(self) -> None:
        """Raise the first fault, if there is one; its `faults` list the others with their own codes and remedies."""
        if not self._found:
            return
        first = self._found[0]
        if len(self._found) > 1:
            first.context["faults"] = [
                {"pointer": error.pointer or "", "detail": error.detail, "code": error.code, "remedy": error.remedy}
                for error in self._found
            ]
        raise first
