"""The one error type of the house, and how it prints itself.

Every failure that a person or a program may have to act on is an `AerieError`: it carries a stable `code`,
the HTTP `status` it maps to, the sentence that says what is wrong (naming both sides where two disagree), and
the remedy. It prints itself as problem+json (RFC 9457) for the API, as text for the terminal and as an event
for the job's history, so no other module maps errors to anything.

`retryable` says whether running the same unit again can help: bad input cannot, a lost disk may.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

_BY_CODE: dict[str, type[AerieError]] = {}


class AerieError(Exception):
    """A failure with a stable code, a status and a remedy."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str, *, remedy: str = "", pointer: str | None = None, **context: Any) -> None:
        """`pointer` is the JSON pointer of the offending field (RFC 6901); `context` is extra JSON-able data."""
        super().__init__(detail)
        self.detail = detail
        self.remedy = remedy
        self.pointer = pointer
        self.context = context

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in cls.__dict__:
            _BY_CODE[cls.code] = cls

    def problem(self, instance: str | None = None) -> dict[str, Any]:
        """This error as an RFC 9457 problem document (a JSON-able dict)."""
        title = (type(self).__doc__ or self.code).strip().splitlines()[0]
        doc: dict[str, Any] = {
            "type": f"urn:aerie:problem:{self.code}",
            "title": title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
        }
        if self.remedy:
            doc["remedy"] = self.remedy
        if self.pointer is not None:
            doc["errors"] = [{"pointer": self.pointer, "detail": self.detail}]
        if self.context:
            doc["context"] = self.context
        if instance:
            doc["instance"] = instance
        return doc

    def text(self) -> str:
        """This error as one to three lines for a terminal."""
        where = f" (at {self.pointer})" if self.pointer else ""
        remedy = f"\n  remedy: {self.remedy}" if self.remedy else ""
        return f"error {self.code}{where}: {self.detail}{remedy}"

    @classmethod
    def from_problem(cls, doc: dict[str, Any]) -> AerieError:
        """The error that printed `doc`, as the same type where this process knows its code."""
        known = _BY_CODE.get(str(doc.get("code")), RemoteError)
        errors: list[dict[str, Any]] = doc.get("errors") or [{}]
        error = known.__new__(known)
        AerieError.__init__(
            error,
            str(doc.get("detail", doc.get("title", "unknown failure"))),
            remedy=str(doc.get("remedy", "")),
            pointer=errors[0].get("pointer"),
            **dict(doc.get("context") or {}),
        )
        if known is RemoteError:
            error.code, error.status = str(doc.get("code", "internal")), int(doc.get("status", 500))  # type: ignore[misc]
        return error


class RemoteError(AerieError):
    """A failure whose type this process does not know."""

    code = "remote"


class InvalidRequest(AerieError):
    """The request or a configuration does not validate."""

    code, status = "request.invalid", 422


def json_pointer(steps: Iterable[str | int]) -> str:
    """The JSON pointer (RFC 6901) of a place in a document; empty for the whole of it."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


def known_codes() -> dict[str, type[AerieError]]:
    """Every code that the imported modules define, for the documentation and for tests."""
    return dict(sorted(_BY_CODE.items()))
