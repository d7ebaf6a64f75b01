"""URLs that carry their own signature (AWS signature version 4 in the query), for any method and with signed headers.

minio-py signs URLs for the host alone. A URL to write with must also fix the headers that the store acts on (the digest
kept with a small object, encryption): a server refuses `x-amz-*` headers that were not signed, so whoever holds the URL can neither
leave them out nor change them. The payload stays unsigned, as in every such URL; readers check size and BLAKE3.

Source: "Authenticating Requests: Using Query Parameters (AWS Signature Version 4)" of the S3 API reference.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

from minio.credentials.credentials import Credentials

ALGORITHM = "AWS4-HMAC-SHA256"
LONGEST_S = 7 * 86400
"""A store takes no URL that is good for longer."""


def presigned(
    method: str, url: str, region: str, credentials: Credentials, expires_s: int, *,
    query: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None, now: datetime | None = None,
) -> str:  # fmt: skip
    """`url` (no query of its own) signed for `method`, `query` and `headers`, good for `expires_s` seconds."""
    at = (now or datetime.now(UTC)).astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{at[:8]}/{region}/s3/aws4_request"
    signed = {"host": urlsplit(url).netloc} | {name.lower(): value.strip() for name, value in (headers or {}).items()}
    names = ";".join(sorted(signed))
    asked = {
        **(query or {}), "X-Amz-Algorithm": ALGORITHM, "X-Amz-Credential": f"{credentials.access_key}/{scope}",
        "X-Amz-Date": at, "X-Amz-Expires": str(expires_s), "X-Amz-SignedHeaders": names,
        **({"X-Amz-Security-Token": credentials.session_token} if credentials.session_token else {}),
    }  # fmt: skip
    said = "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in sorted(asked.items()))
    canonical = "\n".join(
        [method, urlsplit(url).path, said, *(f"{name}:{signed[name]}" for name in sorted(signed)), "", names, "UNSIGNED-PAYLOAD"]
    )  # fmt: skip
    to_sign = "\n".join([ALGORITHM, at, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{credentials.secret_key}".encode()
    for part in (at[:8], region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return f"{url}?{said}&X-Amz-Signature={hmac.digest(key, to_sign.encode(), 'sha256').hex()}"


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~")
