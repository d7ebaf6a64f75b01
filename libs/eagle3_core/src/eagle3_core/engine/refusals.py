"""Which error a server's refusal is: it is too busy, wants another key, redirects, or rejects the request.

Every error names the server and quotes it, since nobody here can see its log. Its kind, and whether to try again, is decided
here. Only for failures of our own capture plug-in the server's word is taken for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPMessage
from typing import Any

from eagle3_core.engine.heard import Ear
from eagle3_core.errors import AerieError

BUSY = frozenset({429, 503})
"""Statuses by which a server says that it has too much to do."""
MOST_RETRY_AFTER_S = 1e10
"""Three hundred years: no server means more, and a larger number is one to no clock."""
OF_PLUGIN: Mapping[str, tuple[str, bool]] = {
    "capture.request": ("This request for hidden states cannot be carried out.", False),
    "capture.missing": ("The engine answered, but its states did not reach the sink.", True),
    "capture.incomplete": ("The engine's states of a prompt are not whole.", True),
    "capture.layers": ("The engine cannot capture the layers that were asked for.", False),
    "capture.stalled": ("The sink of captured states took nothing for longer than it may.", True),
    "capture.sink": ("Captured states could not be written.", True),
    "store.full": ("The store has no room.", True),
}
"""What our plug-in answers with: what it means, and whether the same request again can help."""


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


def answered_error(url: str, status: int, headers: HTTPMessage, body: bytes, ear: Ear) -> AerieError:
    """The error that the server at `url` answered with: the plug-in's own where the message holds one."""
    said = f"{url} answered {status}: {ear.text(body)}"
    if status in BUSY:
        return ServerBusy(said, remedy="send fewer requests at a time", retry_after_s=_retry_after(headers))
    if 300 <= status < 400:
        to = ear.text(headers.get("Location") or "nowhere", 200)
        remedy = "name the address where it really serves, and have the operator list that one"
        return Redirected(f"{url} answered {status} and points to {to}: no redirect is followed", remedy=remedy)
    if status in (401, 403):
        remedy = "name the right key (`key` beside `url`), or have the operator renew it in its file"
        return KeyNotTaken(said, remedy=remedy)
    kind = RequestRefused if 400 <= status < 500 else ServerFailed
    return _of_plugin(url, status, body, ear) or kind(said, remedy="mend the request, or the server")


def _of_plugin(url: str, status: int, body: bytes, ear: Ear) -> AerieError | None:
    """The failure of our plug-in that `body` holds, in its words and of our type; None where it holds none."""
    try:
        problem = ear.document(_message(ear.document(body)))
    except ValueError:
        return None
    code, remedy = problem.get("code"), problem.get("remedy")
    if not isinstance(code, str) or code not in OF_PLUGIN:
        return None
    title, retryable = OF_PLUGIN[code]
    error = AerieError.from_problem({
        "code": code, "title": title, "status": 502,
        "detail": f"{url} answered {status}: {ear.text(str(problem.get('detail') or title))}",
        "remedy": f"{url} says: {ear.text(remedy)}" if isinstance(remedy, str) and remedy else "see the server's log",
    })  # fmt: skip
    error.retryable = retryable  # type: ignore[misc]
    return error


def _message(document: Mapping[str, Any]) -> str:
    """The message in an answer that says what went wrong, wherever SGLang's versions put it."""
    inner = document.get("error")
    nested = inner.get("message") if isinstance(inner, dict) else None
    found = document.get("message") or nested or document.get("detail")
    return found if isinstance(found, str) else ""


def _retry_after(headers: HTTPMessage) -> float:
    """Seconds for which the server wants to be left alone (RFC 9110, 10.2.3); 0 where it does not say."""
    said = (headers.get("Retry-After") or "").strip()
    with suppress(ValueError, OverflowError):
        if said.isdigit():
            return min(float(said), MOST_RETRY_AFTER_S)
        at = parsedate_to_datetime(said)
        left = (at - datetime.now(UTC)).total_seconds() if at.tzinfo is not None else 0.0
        return min(max(0.0, left), MOST_RETRY_AFTER_S)
    return 0.0
