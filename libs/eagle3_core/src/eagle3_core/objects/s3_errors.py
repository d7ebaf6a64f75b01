"""Turns every failure of an S3 store into one of our errors, and says whether it may pass.

Both clients and the transport under them have their own exceptions, and servers report the same thing differently (an XML
body, none, or one under another media type). Here each becomes a code and a status, and then an error that names the object and
the remedy. Texts of the server are quoted; headers are not, since they carry signatures.
"""

from __future__ import annotations

import re
from xml.etree.ElementTree import ParseError

from minio.error import InvalidResponseError, S3Error, ServerError
from obstore.exceptions import BaseError as ObstoreError
from urllib3.exceptions import HTTPError

from eagle3_core.errors import AerieError
from eagle3_core.objects.protocol import (
    MADE_AGAIN,
    ObjectMissing,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    StoreUnfit,
)
from eagle3_core.objects.retry import Verdict

FULL = {
    "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded", "InsufficientStorage", "InsufficientCapacity",
    "EntityTooLargeForQuota", "OverQuota",
}  # fmt: skip
"""How servers say that there is no room (MinIO, Ceph, versitygw, Garage, SeaweedFS)."""
MISSING = {"NoSuchKey", "NoSuchVersion"}
NO_BUCKET = {"NoSuchBucket"}
REFUSED = {
    "AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired",
    "AllAccessDisabled", "AccountProblem", "AuthorizationHeaderMalformed", "RequestTimeTooSkewed", "InvalidClientTokenId",
    "XAdminUserNotFound",
}  # fmt: skip
PASSING = {
    "SlowDown", "SlowDownRead", "SlowDownWrite", "InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted",
    "ThrottlingException", "Throttling", "RequestThrottled", "TooManyRequests", "BadDigest", "XAmzContentSHA256Mismatch",
    "IncompleteBody", "ExpiredToken", "ConditionalRequestConflict", "NoSuchUpload",
}  # fmt: skip
"""Codes that mean: again later. Damage on the way (`BadDigest`, `IncompleteBody`) is among them, and `NoSuchUpload`: the
upload that was completed, unheard, by the request before."""
PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}


class Cut(Exception):
    """An answer ended before its announced length, or was not the one asked for."""


class Answered(Exception):
    """A request that was sent without a client of the store was refused; holds the answer's status and body."""

    def __init__(self, status: int, body: bytes = b"") -> None:
        self.status = status
        code = re.search(r"<Code>(\w+)</Code>", body.decode(errors="replace"))
        self.code = code[1] if code else ""
        super().__init__(f"HTTP {status} {self.code}".strip())


class Damaged(Exception):
    """An answer does not hash to what was stored with it."""


def verdict(failure: Exception, what: str) -> Verdict | None:
    """What `failure` of the request `what` means; None if it does not come from the store."""
    if isinstance(failure, AerieError):
        return Verdict(failure, passing=False)
    if isinstance(failure, HTTPError | ObstoreError) and "certificate" in str(failure).lower():
        return Verdict(_untrusted(failure, what), passing=False)
    if isinstance(
        failure, Cut | Damaged | ParseError | UnicodeDecodeError | HTTPError | ConnectionError | TimeoutError
    ):
        return Verdict(_unavailable(what, f"{type(failure).__name__}: {_first_line(failure)}"), passing=True)
    if isinstance(failure, S3Error | ServerError | InvalidResponseError | ObstoreError | Answered):
        return _judged(failure, what)
    if isinstance(failure, FileNotFoundError) and not failure.filename:  # obstore's word for a 404
        return _judged(failure, what)
    return None


def code_and_status(failure: Exception) -> tuple[str, int]:
    """The store's error code (empty if it gave none) and the HTTP status (0 if there was no answer)."""
    if isinstance(failure, Answered):
        return failure.code, failure.status
    if isinstance(failure, S3Error):
        return failure.code or "", failure.response.status
    if isinstance(failure, ServerError):
        return "", failure.status_code
    text = str(failure)
    if isinstance(failure, InvalidResponseError):
        status = re.search(r"Response code: (\d{3})", text)
    else:
        status = re.search(r"status code: (\d{3})|HTTP error: \w+ \((\d{3})", text)
    code = re.search(r"<Code>(\w+)</Code>", text)
    return code[1] if code else "", int(next(filter(None, status.groups()))) if status else 0


def _judged(failure: Exception, what: str) -> Verdict:
    code, status = code_and_status(failure)
    said = f"{code or 'no code'}, HTTP {status or 'none'}"
    if code in FULL or status == 507:
        return Verdict(
            StoreFull(f"{what}: the store has no room ({said})", remedy="free space or raise the quota; jobs go on by themselves"),
            passing=False,
        )  # fmt: skip
    if code in PASSING or (status in PASSING_STATUS and code not in REFUSED):
        return Verdict(_unavailable(what, said), passing=True)
    if code in NO_BUCKET:
        return Verdict(StoreUnfit(f"{what}: there is no such bucket", remedy="make the bucket first"), passing=False)
    if code in MISSING or (not code and (status == 404 or isinstance(failure, FileNotFoundError))):
        return Verdict(_missing(what), passing=False)
    if code in REFUSED or status in (401, 403):
        return Verdict(
            StoreRefused(
                f"{what}: refused ({said})",
                remedy="check credentials, the bucket's policy and this machine's clock (docs/storage.md)",
            ),
            passing=False,
        )  # fmt: skip
    if isinstance(failure, ObstoreError) and not code and not status:  # its word for every failure of the transport
        return Verdict(_unavailable(what, _first_line(failure)), passing=True)
    return Verdict(
        StoreUnfit(f"{what}: the store does not do this ({said}): {_first_line(failure)}", remedy="see docs/storage.md"),
        passing=False,
    )  # fmt: skip


def _first_line(failure: Exception) -> str:
    return re.sub(r"X-Amz-[A-Za-z-]+=[^&\s]*", "X-Amz-...", str(failure).split("\n", 1)[0])[:300]


def _unavailable(what: str, why: str) -> StoreUnavailable:
    return StoreUnavailable(f"{what}: {why}"[:600], remedy="look after the object store; the unit is tried again")


def _missing(what: str) -> ObjectMissing:
    return ObjectMissing(f"{what}: there is no such object", remedy=MADE_AGAIN)


def _untrusted(failure: Exception, what: str) -> AerieError:
    return StoreRefused(
        f"{what}: the server's certificate is not trusted: {_first_line(failure)}"[:600],
        remedy="name the authority's certificate in SSL_CERT_FILE",
    )
