"""What a server's answer means that is none: it is too busy, wants another key, points elsewhere, or refuses the request.

Every one names the server and says what it said, since nobody here can see its log.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPResponse

from eagle3_core.errors import AerieError

BUSY = frozenset({429, 503})
"""Statuses by which a server says that it has too much to do."""


class ServerFailed(AerieError):
    """The verifier's server did not start, or ended, or answers what it should not."""

    code, status, retryable = "verifier.server", 502, True


class ServerBusy(AerieError):
    """The verifier's server turned a request away."""

    code, status, retryable = "verifier.busy", 503, True


class RequestRefused(ServerFailed):
    """The verifier's server does not take a request as it is."""

    code, status, retryable = "verifier.request", 502, False


class EndpointDown(ServerFailed):
    """A server that the job names does not answer, or breaks off."""

    code, status, retryable = "endpoint.down", 502, True


class Redirected(RequestRefused):
    """A server that the job names points to another address, which nobody allowed."""

    code, status, retryable = "endpoint.redirect", 502, False


class KeyNotTaken(RequestRefused):
    """A server that the job names wants a key, or another one."""

    code, status, retryable = "endpoint.key_not_taken", 502, False


def answered_error(url: str, answer: HTTPResponse, body: bytes) -> AerieError:
    """The error that the server at `url` answered with: the plug-in's own where the message holds one."""
    status, text = answer.status, body.decode(errors="replace")
    said = f"{url} answered {status}: {text[:500]}"
    if status in BUSY:
        return ServerBusy(said, remedy="send fewer requests at a time", retry_after_s=_retry_after(answer))
    if 300 <= status < 400:
        to = answer.getheader("Location") or "nowhere"
        remedy = "name the address where it really serves, and have the operator list that one"
        return Redirected(f"{url} answered {status} and points to {to:.200}: no redirect is followed", remedy=remedy)
    if status in (401, 403):
        remedy = "name the right key (`key` beside `url`), or have the operator renew it in its file"
        return KeyNotTaken(said, remedy=remedy)
    try:
        document = json.loads(text)
        message = document.get("message") or (document.get("error") or {}).get("message") or document.get("detail")
        return AerieError.from_problem(json.loads(message))
    except (ValueError, TypeError, AttributeError):
        kind = RequestRefused if 400 <= status < 500 else ServerFailed
        return kind(said, remedy="mend the request, or the server")


def _retry_after(answer: HTTPResponse) -> float:
    """Seconds for which the server wants to be left alone (RFC 9110, 10.2.3); 0 where it does not say."""
    said = (answer.getheader("Retry-After") or "").strip()
    with suppress(ValueError):
        if said.isdigit():
            return float(said)
        at = parsedate_to_datetime(said)
        return max(0.0, (at - datetime.now(UTC)).total_seconds()) if at.tzinfo is not None else 0.0
    return 0.0
