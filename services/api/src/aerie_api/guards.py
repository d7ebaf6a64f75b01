"""What every request passes before any code of ours sees it.

An API on the loopback address is still reachable by every web page that the same person opens: a page's script can post
forms to it, and a name that resolves to 127.0.0.1 lets it read answers (DNS rebinding). So the Host must be this
machine's, a foreign Origin is refused, and a body must call itself JSON, which a form cannot. Bodies are read here,
whole and bounded, because everything behind wants them whole.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager
from urllib.parse import urlsplit

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aerie_api.auth import CALLER, Caller
from aerie_api.engines import unavailable, worth_repeating
from aerie_api.metrics import observe_request
from aerie_api.problems import problem_response, unforeseen
from aerie_api.settings import Settings
from aerie_api.tenants.gate import Gate, TooManyRequests
from eagle3_core.addresses import is_loopback
from eagle3_core.errors import AerieError
from eagle3_core.telemetry import logs, traces

logger = logging.getLogger("aerie_api.access")
_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WITH_BODY = ("POST", "PUT", "PATCH", "DELETE")
WORKER_PREFIX = "/internal/"
OPEN = frozenset({"/", "/healthz", "/readyz", "/openapi.json"})
"""What anybody may ask."""
UNTRACED = frozenset({"/healthz", "/readyz", "/internal/v1/claim", "/internal/v1/stops"})
MAX_ATTEMPTS = 5
"""Runs of one request whose transaction keeps losing against others."""


class ForeignHost(AerieError):
    """The request was meant for another host."""

    code, status = "request.host", 421


class ForeignOrigin(AerieError):
    """The request was sent by another site's page."""

    code, status = "request.origin", 403


class BodyTooLarge(AerieError):
    """The body is larger than the API takes."""

    code, status = "request.too_large", 413


class NotJson(AerieError):
    """The body is not declared as JSON."""

    code, status = "request.media_type", 415


class BadLength(AerieError):
    """The request does not say how long it is in a way that can be read."""

    code, status = "request.length", 400


class NotText(AerieError):
    """The address holds what is no text."""

    code, status = "request.text", 422


class Disconnected(Exception):
    """The client went away while its body was read."""


class Guards:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        scope["aerie_request_id"] = request_id
        answer = _Answer(scope, send, request_id)
        with logs.about(request_id=request_id), _traced(scope, headers) as span:
            try:
                await self._guarded(scope, headers, receive, answer)
            finally:
                answer.log()
                if answer.route is not None:
                    span.rename(f"{scope['method']} {answer.route}")
                span.set(request_id=request_id, status=answer.status)
        return None

    async def _guarded(self, scope: Scope, headers: Headers, receive: Receive, answer: _Answer) -> None:
        """Have the request answered, also when something is wrong with it."""
        request_id = scope["aerie_request_id"]
        try:
            self._check_origin(scope, headers)
            _check_text(scope)
            await self._admit(scope, headers, answer)
            body = await self._body(scope, headers, receive)
            await self._serve(scope, receive, answer, body)
        except AerieError as error:
            await problem_response(error, request_id)(scope, receive, answer.send)
        except Disconnected:
            answer.status = 499
        except Exception as error:
            response = unforeseen(error, request_id)
            if answer.status:  # too late to say it: break the answer off, so that it is not taken for whole
                raise
            await response(scope, receive, answer.send)

    async def _admit(self, scope: Scope, headers: Headers, answer: _Answer) -> None:
        """Find out who asks; workers show their tokens to the routes themselves."""
        if scope["path"] in OPEN or scope["path"].startswith(WORKER_PREFIX):
            return
        gate: Gate = scope["app"].state.house.gate
        authorization = headers.get("authorization", "")
        if (caller := gate.without_key(authorization, scope["aerie_request_id"])) is not None:
            scope["aerie_caller"] = caller
            return
        try:
            caller, verdict = await run_in_threadpool(gate.admit, authorization, scope["aerie_request_id"])
        except SQLAlchemyError as error:
            if (told := unavailable(error)) is None:
                raise
            raise told from None
        scope["aerie_caller"] = caller
        if verdict is not None:
            answer.extra = verdict.headers
            if not verdict.allowed:
                answer.extra["Retry-After"] = str(verdict.retry_after_s)
                raise TooManyRequests(
                    f"the key {caller.key_id} made more than {verdict.rate.per_minute:g} requests a minute",
                    remedy=f"wait {verdict.retry_after_s} s; poll with If-None-Match, or read events as a stream",
                )

    async def _serve(self, scope: Scope, receive: Receive, answer: _Answer, body: bytes) -> None:
        """Have the request answered; again if its transaction was ended in favour of another one, which undid it whole."""
        CALLER.set(scope.get("aerie_caller"))
        for attempt in itertools.count(1):
            inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else dict(scope)
            answer.inner = inner
            try:
                if scope["method"] == "HEAD":
                    head = _Head(answer.send)
                    return await self._app(inner, head.receive, head.send)
                return await self._app(inner, _replay(body, receive), answer.send)
            except SQLAlchemyError as error:
                if answer.status:
                    raise
                if not worth_repeating(error) or attempt == MAX_ATTEMPTS:
                    if (told := unavailable(error)) is None:
                        raise
                    logger.warning("request %s: %s", scope["aerie_request_id"], error)
                    raise told from None
            await asyncio.sleep(attempt * random.uniform(0.01, 0.05))  # noqa: S311 - no secret hangs on it

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        if not self._ours(host):
            raise ForeignHost(
                f"the Host header says {host[:200]!r}, this API listens on {self._settings.host}",
                remedy="address it as 127.0.0.1 or localhost, or name the host in AERIE_ALLOWED_HOSTS",
            )
        origin = headers.get("origin")
        if origin is not None and scope["method"] in _WITH_BODY and not self._ours(_authority(origin)):
            raise ForeignOrigin(
                f"the page {origin[:200]!r} may not change anything here", remedy="use the API's own address"
            )

    def _ours(self, authority: str) -> bool:
        if not self._settings.loopback and not self._settings.allowed_hosts:
            return True
        name = re.sub(r":\d*$", "", authority).strip("[]").lower()
        return (self._settings.loopback and is_loopback(name)) or name in self._settings.allowed_hosts

    async def _body(self, scope: Scope, headers: Headers, receive: Receive) -> bytes:
        if scope["method"] not in _WITH_BODY:
            return b""
        worker = scope["path"].startswith(WORKER_PREFIX)
        limit = self._settings.max_worker_body_bytes if worker else self._settings.max_body_bytes
        declared = headers.get("content-length", "0")
        if not (declared.isascii() and declared.isdigit()):
            raise BadLength(f"Content-Length is {declared[:40]!r}", remedy="send a whole number of bytes")
        if len(declared) > 18 or int(declared) > limit:
            raise _too_large(f"{declared[:40]} bytes", limit)
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            body += message.get("body", b"")
            if len(body) > limit:
                raise _too_large(f"more than {limit} bytes", limit)
            if not message.get("more_body", False):
                break
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and kind != "application/json":
            raise NotJson(f"the body is declared as {kind[:100]!r}", remedy="send Content-Type: application/json")
        return bytes(body)


def _check_text(scope: Scope) -> None:
    """Raise NotText for an address with a NUL, which no database column could be compared with."""
    if "\0" in scope["path"] or b"%00" in scope["query_string"] or b"\0" in scope["query_string"]:
        raise NotText("the address holds a NUL", remedy="send text")


def _too_large(have: str, limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has {have}, the limit is {limit}",
        remedy="put data into files and name them by URI; the operator sets the limit with AERIE_MAX_BODY_BYTES",
    )


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that hands out `body` once, then whatever comes (a disconnect)."""
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


class _Head:
    """Answers HEAD as GET would, without the content (RFC 9110, 9.3.2): once the headers are out, the application is told
    that the client has left, so that nothing is read or waited for in vain."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._asked = False
        self._answered = asyncio.Event()

    async def receive(self) -> Message:
        """An empty body, then the end."""
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._answered.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Pass the headers on, and nothing else."""
        if message["type"] == "http.response.start":
            await self._send(message)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            self._answered.set()


class _Answer:
    """Watches the response: adds the headers that every answer has, and writes the access log."""

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self._scope = scope
        self._send = send
        self._request_id = request_id
        self._started = time.monotonic()
        self.status = 0
        self.extra: dict[str, str] = {}
        """Headers that the answer gets besides its own."""
        self.inner: Scope = {}
        """What the application was given; the router writes into it which route it found."""

    @property
    def route(self) -> str | None:
        """The template of the route that answered, of a closed set."""
        return getattr(self.inner.get("route"), "path", None)

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-ID"] = self._request_id
            headers.update(self.extra)
            headers.setdefault("Cache-Control", "no-store")
            headers.setdefault("X-Content-Type-Options", "nosniff")
        await self._send(message)

    def log(self) -> None:
        """One line a request. Path and method are escaped: a client cannot write lines of its own."""
        elapsed_s = time.monotonic() - self._started
        path = self._scope["path"].encode("unicode_escape").decode()[:512]
        method = self._scope["method"].encode("unicode_escape").decode()[:16]
        caller: Caller | None = self._scope.get("aerie_caller")
        observe_request(self._scope["method"], self.route, self.status, elapsed_s)
        elapsed_ms = round(elapsed_s * 1e3, 1)
        said: dict[str, object] = {"method": method, "path": path, "status": self.status, "ms": elapsed_ms}
        if caller is not None:
            said |= {"tenant": caller.tenant, "key": caller.key_id or "local"}
        logger.info("%s %s %d", method, path, self.status, extra=said)


@contextmanager
def _traced(scope: Scope, headers: Headers) -> Generator[traces.Span]:
    """A span around a request, but for those that only wait or only ask whether we live."""
    if scope["path"] in UNTRACED:
        yield traces.Span(None)
        return
    with traces.span(scope["method"][:16], headers.get("traceparent"), "server") as span:
        yield span


def _authority(origin: str) -> str:
    """Host and port of an Origin header; of what is no URL, something that is nobody's."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return "-"
