"""Which addresses are this machine's own: what decides where a token may go in clear text and who needs a key."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from eagle3_core.errors import AerieError


class PlainHttpRefused(AerieError):
    """A secret would cross a network in clear text, and nobody asked for that."""

    code, status = "settings.plain_http", 422


def require_encrypted(url: str, secret: str, *, allowed: bool) -> None:
    """Raise PlainHttpRefused where `secret` (in words), sent to the http(s) address `url`, could be read on the way.

    `allowed`: the operator says that something else encrypts.
    """
    parts = urlsplit(url)
    if parts.scheme != "https" and not allowed and not is_loopback((parts.hostname or "").rstrip(".")):
        raise PlainHttpRefused(
            f"{url} is another machine's and not encrypted: {secret} could be read on the way",
            remedy="use https, or AERIE_ALLOW_PLAIN_HTTP=1 where something else encrypts",
        )


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address, IPv6 without brackets) is this machine and no other."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
