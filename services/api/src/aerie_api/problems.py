"""Every error is a problem document (RFC 9457), whoever raised it.

Our own errors know how to print themselves; what the framework and the libraries raise is translated here. A client
never sees a traceback: what nobody foresaw is logged under the request's id, and the id is what the client gets.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.routing import Match

from eagle3_core.errors import AerieError, InvalidRequest, json_pointer
from eagle3_core.faults import headline, own_faults, sentence

MEDIA_TYPE = "application/problem+json"
logger = logging.getLogger(__name__)


class Fault(BaseModel):
    """One offending field."""

    model_config = ConfigDict(extra="allow")

    pointer: str
    detail: str


class Problem(BaseModel):
    """A problem document."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    type: str = "about:blank"
    title: str = ""
    status: int = 500
    detail: str = ""
    code: str = "internal"
    """Stable name of the kind of problem; programs decide by it."""
    remedy: str | None = None
    """What to do about it."""
    errors: list[Fault] | None = None
    instance: str | None = None
    request_id: str | None = None


class NoSuchRoute(AerieError):
    """There is nothing at this address."""

    code, status = "request.not_found", 404


class MethodNotAllowed(AerieError):
    """The address does not answer to this method."""

    code, status = "request.method", 405


class Refused(AerieError):
    """The request was refused."""

    code, status = "request.refused", 400


class Unforeseen(AerieError):
    """Something went wrong that nobody foresaw."""

    code, status = "internal", 500


def problem_document(error: AerieError, request_id: str) -> dict[str, Any]:
    """`error` as the document that a client gets."""
    document = error.problem(f"urn:aerie:request:{request_id}")
    document["request_id"] = request_id
    return document


def problem_response(error: AerieError, request_id: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """`error` as a response."""
    extra = dict(headers or {})
    if error.status == 401:
        extra["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503) or error.retryable:
        extra.setdefault("Retry-After", "2")
    return JSONResponse(problem_document(error, request_id), error.status, extra, MEDIA_TYPE)


def unforeseen(error: Exception, request_id: str) -> JSONResponse:
    """The answer to an error that nobody foresaw; what it was goes to the log."""
    logger.error("request %s failed", request_id, exc_info=error)
    told = Unforeseen(
        f"the API failed on request {request_id}",
        remedy="find the request's id in the API's log; report what stands there",
    )
    return problem_response(told, request_id)


def install(app: FastAPI) -> None:
    """Answer every error of `app` with a problem document."""
    app.add_exception_handler(AerieError, _aerie)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _validation)


def request_id_of(request: Request) -> str:
    """The request's id, as `guards` set it."""
    return str(request.scope.get("aerie_request_id", "unknown"))


async def _aerie(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AerieError)
    if error.status >= 500:
        logger.error("request %s: %s", request_id_of(request), error.text(), exc_info=error)
    return problem_response(error, request_id_of(request))


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, dict(error.headers or {})
    if error.status_code == 404:
        slash = "leave out the slash at its end; " if path.endswith("/") else ""
        told: AerieError = NoSuchRoute(f"nothing at {path!r}", remedy=f"{slash}/openapi.json lists the addresses")
    elif error.status_code == 405:
        headers["Allow"] = ", ".join(allowed_methods(request))
        told = MethodNotAllowed(
            f"{path!r} does not answer to {request.method!r}, but to {headers['Allow']}",
            remedy="use one of these methods; /openapi.json says what each does",
        )
    else:
        told = Refused(str(error.detail), remedy="correct the request")
    return problem_response(told, request_id_of(request), headers)


def allowed_methods(request: Request) -> list[str]:
    """The methods that the request's address answers to: of every route that bears it, and HEAD where there is GET."""
    routes = request.app.router.routes
    found = [
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(route.matches({**request.scope, "method": method})[0] == Match.FULL for route in routes)
    ]
    return ["GET", "HEAD", *found[1:]] if found[:1] == ["GET"] else found


async def _validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = [
        {"pointer": _pointer(e["loc"]), "detail": sentence(e)} for e in own_faults(error.errors(), {"body": error.body})
    ]
    told = InvalidRequest(
        headline(faults[0]["detail"], len(faults)),
        remedy="/openapi.json lists parameters and fields",
        pointer=faults[0]["pointer"],
        faults=faults,
    )
    return problem_response(told, request_id_of(request))


def _pointer(location: tuple[int | str, ...]) -> str:
    """A JSON pointer for a fault in the body; `query/limit` and the like for one elsewhere."""
    place, *rest = location or ("body",)
    inside = json_pointer(rest)
    return inside or "/" if place == "body" else f"{place}{inside}"
