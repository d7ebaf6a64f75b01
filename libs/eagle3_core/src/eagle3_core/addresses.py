"""Which addresses are this machine's own, or no server's: what decides where a token may go in clear text and who needs a key."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from eagle3_core.errors import AerieError


class PlainHttpRefused(AerieError):
    """A secret would cross a network in clear text, and nobody asked for that."""

    code, status = "settings.plain_http", 422


class MetadataServiceRefused(AerieError):
    """A name leads to an address where clouds tell a machine its secrets."""

    code, status = "endpoint.metadata_service", 422


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


def require_no_metadata_service(url: str, connected: socket.socket) -> None:
    """Raise MetadataServiceRefused where the name in `url` led `connected` to a link-local address.

    Nobody serves a model there, clouds hand out credentials there (169.254.169.254), and whoever owns a name decides
    where it leads, after the operator has listed it. An address that the operator wrote down himself is his own choice.
    """
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    peer = str(connected.getpeername()[0]).partition("%")[0]
    address = ipaddress.ip_address(peer)
    mapped = getattr(address, "ipv4_mapped", None) or address
    if mapped.is_link_local and (urlsplit(url).hostname or "") != peer:
        raise MetadataServiceRefused(
            f"{url} leads to {peer}, an address of this machine's own network segment where clouds keep credentials",
            remedy="see who changed where the name leads; list the server by its address if it is really there",
        )
