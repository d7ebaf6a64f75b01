"""The one error type of the house, and how it prints itself.

Every failure that a person or a program may have to act on is an `AerieError`: it carries a stable `code`,
the HTTP `status` it maps to, the sentence that says what is wrong (naming both sides where two disagree), and
the remedy. It prints itself as problem+json (RFC 9457) for the API, as text for the terminal and as an event
for the job's history, so no other module maps errors to anything.

`retryable` says whether running the same unit again can help: bad input cannot, a lost disk may.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from eagle3_core.text import sayable

_BY_CODE: dict[str, type[AerieError]] = {}


class AerieError(Exception):
    """A failure with a stable code, a status and a remedy."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str, *, remedy: str = "", pointer: str | None = None, **context: Any) -> None:
        """`pointer` is the JSON pointer of the offending field (RFC 6901); `context` is extra JSON-able data.

        Where several fields are wrong, context `faults` lists them all: [{"pointer": ..., "detail": ...}].
        """
        self.detail: str = sayable(detail)
        super().__init__(self.detail)
        self.remedy: str = sayable(remedy)
        self.pointer: str | None = sayable(pointer)
        self.context: dict[str, Any] = sayable(context)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in cls.__dict__:
            _BY_CODE[cls.code] = cls

    @property
    def title(self) -> str:
        """What this kind of failure is: the same for every failure of one code."""
        return (type(self).__doc__ or self.code).strip().splitlines()[0]

    def problem(self, instance: str | None = None) -> dict[str, Any]:
        """This error as an RFC 9457 problem document (a JSON-able dict)."""
        doc: dict[str, Any] = {
            "type": f"urn:aerie:problem:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
        }
        if self.remedy:
            doc["remedy"] = self.remedy
        context = dict(self.context)
        if faults := context.pop("faults", None):
            doc["errors"] = faults
        elif self.pointer is not None:
            doc["errors"] = [{"pointer": self.pointer, "detail": self.detail}]
        if context:
            doc["context"] = context
        if instance:
            doc["instance"] = instance
        return doc

    def text(self) -> str:
        """This error as one to three lines for a terminal."""
        where = f" (at {self.pointer})" if self.pointer else ""
        remedy = f"\n  remedy: {self.remedy}" if self.remedy else ""
        return f"error {self.code}{where}: {self.detail}{remedy}"

    @classmethod
    def from_problem(cls, doc: Mapping[str, Any]) -> AerieError:
        """The error that printed `doc`, as the same type where this process knows its code.

        Whatever `doc` holds gives an error: who reports one may be a proxy, or another program altogether.
        """
        code = doc.get("code")
        known = _BY_CODE.get(code, RemoteError) if isinstance(code, str) else RemoteError
        error = known.__new__(known)
        detail = doc.get("detail") or doc.get("title") or "unknown failure"
        faults = _faults(doc)
        pointer = faults[0]["pointer"] if faults else None
        AerieError.__init__(error, str(detail), remedy=str(doc.get("remedy") or ""), pointer=pointer)
        context = doc.get("context")
        error.context = {str(name): value for name, value in context.items()} if isinstance(context, Mapping) else {}
        if len(faults) > 1:
            error.context["faults"] = faults
        if isinstance(error, RemoteError):
            error.take_over(doc)
        return error


def _faults(doc: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The offending fields that `doc` lists, as far as they name one."""
    errors = doc.get("errors")
    listed: list[Any] = errors if isinstance(errors, list) else []
    return [dict(fault) for fault in listed if isinstance(fault, Mapping) and isinstance(fault.get("pointer"), str)]


class RemoteError(AerieError):
    """A failure whose type this process does not know."""

    code = "remote"
    _title = ""

    @property
    def title(self) -> str:
        """As the other process said it."""
        return self._title or super().title

    def take_over(self, doc: Mapping[str, Any]) -> None:
        """Be what `doc` says, as far as it says it: code, status, title."""
        code, status, title = doc.get("code"), doc.get("status"), doc.get("title")
        self.code = code if isinstance(code, str) and code else "internal"  # type: ignore[misc]
        whole = isinstance(status, int) and not isinstance(status, bool) and 400 <= status <= 599
        self.status = status if whole else 500  # type: ignore[misc]
        self._title = title if isinstance(title, str) else ""


class InvalidRequest(AerieError):
    """The request or a configuration does not validate."""

    code, status = "request.invalid", 422


def json_pointer(steps: Iterable[str | int]) -> str:
    """The JSON pointer (RFC 6901) of a place in a document; empty for the whole of it."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


def error_types(base: type[AerieError] = AerieError) -> set[type[AerieError]]:
    """`base` and every type below it that the imported modules define: what the page of error codes is made from."""
    return {base}.union(*(error_types(kind) for kind in base.__subclasses__()))
