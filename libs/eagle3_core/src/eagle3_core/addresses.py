"""Which addresses belong to this machine or to no server at all.

It decides where a token may be sent in clear text, and which callers need a key.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from eagle3_core.errors import AerieError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in ("fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "fd20:ce::254", "fd00:42::42")
)
"""Where clouds tell a machine its secrets, beside link-local addresses: Amazon's by IPv6, Alibaba's, Oracle's, Azure's,
Google's and Scaleway's by IPv6."""
NAT64 = tuple(ipaddress.IPv6Network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48"))
"""Prefixes behind which a translator reaches IPv4 (RFC 6052, RFC 8215); the last 32 bits are the address there."""
COMPATIBLE = ipaddress.IPv6Network("::/96")
"""IPv4 in IPv6 as it was first written (RFC 4291, 2.5.5.1)."""


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
    """Raise MetadataServiceRefused where the name in `url` led `connected` to where clouds hand out credentials.

    That is a link-local address (169.254.169.254) or one of `METADATA`, in IPv6's ways to write or reach it too. Nobody
    serves a model there, and whoever owns a name decides where it leads, after the operator has listed it. An address
    that the operator wrote down himself is his own choice.
    """
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    peer = str(connected.getpeername()[0]).partition("%")[0]
    leads = any(address.is_link_local or address in METADATA for address in _meant(ipaddress.ip_address(peer)))
    if leads and (urlsplit(url).hostname or "") != peer:
        raise MetadataServiceRefused(
            f"{url} leads to {peer}, where clouds keep credentials of this machine",
            remedy="see who changed where the name leads; list the server by its address if it is really there",
        )


def _meant(address: Address) -> list[Address]:
    """`address`, and what IPv4 addresses packets to it may go to."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    held = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in (*NAT64, COMPATIBLE)):
        held.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [address, *(inner for inner in held if inner is not None)]
