"""Which bucket a URL names, on which server, and how it is spoken to. Never with what secret.

    s3://BUCKET/PREFIX?endpoint=https://minio.example:9000&region=us-east-1&sse=AES256

A URL is copied into arguments, logs and job documents, so a secret in one is refused and not repeated in the refusal.
TLS is the default; plain http is for this machine, or for a network that somebody called trusted by name
(`plain_http=allowed`).
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from eagle3_core.errors import AerieError
from eagle3_core.objects.protocol import BadKey, checked_key

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[a-z0-9-]{1,40}")
_ENCRYPTION = re.compile(r"AES256|aws:kms:[A-Za-z0-9:/_-]{1,2048}")
FIELDS = ("endpoint", "public_endpoint", "region", "sse", "plain_http", "style")


class BadStoreUrl(AerieError):
    """The URL of the object store is not well formed, or not safe."""

    code, status = "store.url", 500


@dataclass(frozen=True)
class S3Address:
    """A place in an S3 store."""

    bucket: str
    prefix: str
    """Ends with a slash unless it is empty."""
    host: str
    """Host, and port where it is not the scheme's own."""
    tls: bool
    region: str
    encryption: str
    """`AES256` or `aws:kms:KEY`; empty: as the bucket does it."""
    virtual_host: bool
    """Whether the bucket is part of the host name (AWS) or of the path (most others)."""
    public: str
    """URL that clients outside reach the server by; empty: the endpoint's own."""

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return f"{'https' if self.tls else 'http'}://{self.host}"

    @property
    def trusted(self) -> bool:
        """Whether nobody between here and the server can change bytes: TLS, or this machine."""
        return self.tls or self.loopback

    @property
    def loopback(self) -> bool:
        """Whether the server is this machine."""
        return _is_loopback(self.host)

    @property
    def hostname(self) -> str:
        """The host without its port and brackets."""
        return re.sub(r":\d+$", "", self.host).strip("[]")

    def object_name(self, key: str) -> str:
        """The name of `key` in the bucket. Raises BadKey."""
        return self.prefix + checked_key(key)

    def object_url(self, key: str) -> str:
        """Where the server has `key`. Raises BadKey."""
        name = quote(self.object_name(key))
        if self.virtual_host:
            return f"{'https' if self.tls else 'http'}://{self.bucket}.{self.host}/{name}"
        return f"{self.endpoint}/{self.bucket}/{name}"

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix} at {self.endpoint}"


def s3_address(url: str) -> S3Address:
    """The place that `url` names. Raises BadStoreUrl, which never repeats a secret."""
    try:
        if not url.isascii() or not url.isprintable():  # urlsplit would drop line breaks without a word
            raise ValueError("odd characters")
        parts = urlsplit(url)
        asked = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise BadStoreUrl(
            "the store's URL cannot be read", remedy="s3://BUCKET/PREFIX?endpoint=https://HOST"
        ) from error
    _no_secret(parts)
    fields = dict(asked)
    if unknown := sorted(set(fields) - set(FIELDS)):
        raise BadStoreUrl(
            f"the store's URL has the unknown fields {', '.join(map(repr, unknown))}",
            remedy=f"it may have {', '.join(FIELDS)}; secrets come from the environment (docs/storage.md)",
        )
    if len(fields) != len(asked) or parts.fragment:
        raise BadStoreUrl("the store's URL says something twice, or has a #fragment", remedy="say each thing once")
    region = _matching(_REGION, fields.get("region", "us-east-1"), "region", "us-east-1")
    endpoint = fields.get("endpoint", f"https://s3.{region}.amazonaws.com")
    host, tls = _server(endpoint, plain=_choice(fields, "plain_http", ("refused", "allowed")) == "allowed")
    public = fields.get("public_endpoint", "")
    if public:
        _server(public, plain=True)
    return S3Address(
        bucket=_matching(_BUCKET, parts.netloc, "bucket", "my-bucket"), prefix=_prefix(unquote(parts.path)), host=host,
        tls=tls, region=region, public=public,
        encryption=_matching(_ENCRYPTION, fields["sse"], "sse", "AES256 or aws:kms:KEY") if "sse" in fields else "",
        virtual_host=_choice(fields, "style", ("path" if "endpoint" in fields else "host", "path", "host")) == "host",
    )  # fmt: skip


def _no_secret(parts: SplitResult) -> None:
    if "@" in parts.netloc:
        raise BadStoreUrl(
            "the store's URL carries a user or a secret before an @",
            remedy="put credentials into the environment (AERIE_S3_ACCESS_KEY_FILE, AERIE_S3_SECRET_KEY_FILE), not into the URL",
        )


def _server(url: str, *, plain: bool) -> tuple[str, bool]:
    """Host (with its port) and whether it speaks TLS."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadStoreUrl("the endpoint cannot be read", remedy="use https://HOST or https://HOST:PORT") from error
    _no_secret(parts)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise BadStoreUrl(f"the endpoint {url!r} is no server", remedy="use https://HOST or https://HOST:PORT")
    if parts.fragment or not re.fullmatch(r"[A-Za-z0-9.:-]+", parts.hostname):
        raise BadStoreUrl(f"the endpoint {url!r} is no server", remedy="use https://HOST or https://HOST:PORT")
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    host = name if port in (None, 443 if parts.scheme == "https" else 80) else f"{name}:{port}"
    if parts.scheme == "http" and not plain and not _is_loopback(host):
        raise BadStoreUrl(
            f"the endpoint {url!r} would send hidden states over the network unencrypted",
            remedy="use https://, or add plain_http=allowed if the network is trusted",
        )
    return host, parts.scheme == "https"


def _is_loopback(host: str) -> bool:
    name = re.sub(r":\d+$", "", host).strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


def _prefix(path: str) -> str:
    inner = path.strip("/")
    if not inner:
        return ""
    try:
        return checked_key(inner) + "/"
    except BadKey as error:
        raise BadStoreUrl(f"the prefix {inner!r} is not well formed", remedy=error.remedy) from error


def _matching(pattern: re.Pattern[str], value: str, what: str, example: str) -> str:
    if not pattern.fullmatch(value):
        raise BadStoreUrl(f"{value[:80]!r} is no {what}", remedy=f"for instance {example}")
    return value


def _choice(fields: dict[str, str], name: str, values: tuple[str, ...]) -> str:
    """The field's value; the first of `values` where it is absent."""
    value = fields.get(name, values[0])
    if value not in values:
        raise BadStoreUrl(f"{name}={value[:40]!r}", remedy=f"use one of {', '.join(sorted(set(values)))}")
    return value
