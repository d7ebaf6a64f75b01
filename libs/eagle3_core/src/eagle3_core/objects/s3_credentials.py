"""Who this process is to the store: read from the environment or from files that it names, never from a URL.

In this order, the first that says anything:

    AERIE_S3_ACCESS_KEY_FILE, AERIE_S3_SECRET_KEY_FILE [, AERIE_S3_SESSION_TOKEN_FILE]   files, for mounted secrets
    AERIE_S3_ACCESS_KEY, AERIE_S3_SECRET_KEY [, AERIE_S3_SESSION_TOKEN]
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY [, AWS_SESSION_TOKEN]
    AWS_WEB_IDENTITY_TOKEN_FILE or AWS_CONTAINER_CREDENTIALS_RELATIVE_URI                 roles of AWS

Files are read again once a minute, so that a rotated secret is taken up without a restart. Both clients of the store
ask the one object made here.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from minio.credentials.credentials import Credentials
from minio.credentials.providers import IamAwsProvider, Provider

from eagle3_core.objects.protocol import StoreRefused
from eagle3_core.objects.s3_environment import AWS, OWN, OWN_FILES, ROLES

REREAD_S = 60.0


class S3Credentials(Provider):
    """The credentials in force. Prints itself without them."""

    def __init__(self, source: str, read: Callable[[], Credentials], lasts_s: float = REREAD_S) -> None:
        self.source = source
        self._read, self._lasts_s = read, lasts_s
        self._lock = threading.Lock()
        self._held: Credentials | None = None
        self._read_at = 0.0

    def __repr__(self) -> str:
        return f"S3Credentials({self.source})"

    def retrieve(self) -> Credentials:
        """What to sign with now. Raises StoreRefused."""
        with self._lock:
            if self._held is None or time.monotonic() - self._read_at > self._lasts_s or self._held.is_expired():
                self._held, self._read_at = self._read(), time.monotonic()
            return self._held

    def for_obstore(self) -> dict[str, Any]:
        """The same, as the bulk writer wants it."""
        held = self.retrieve()
        ends = [held.expiration.replace(tzinfo=UTC)] if held.expiration is not None else []
        if math.isfinite(self._lasts_s):
            ends.append(datetime.now(UTC) + timedelta(seconds=self._lasts_s))
        return {
            "access_key_id": held.access_key, "secret_access_key": held.secret_key, "token": held.session_token,
            "expires_at": min(ends, default=None),
        }  # fmt: skip


def credentials_in(environment: Mapping[str, str]) -> S3Credentials:
    """The credentials that `environment` holds or points to. Raises StoreRefused where there are none, or half of them."""
    files = [environment.get(name, "") for name in OWN_FILES]
    if any(files):
        _both(files, f"{OWN_FILES[0]} and {OWN_FILES[1]}")
        found = S3Credentials("files", lambda: _from_files(*files))
        found.retrieve()
        return found
    for names in (OWN, AWS):
        values = [environment.get(name, "") for name in names]
        if any(values):
            _both(values, f"{names[0]} and {names[1]}")
            given = Credentials(values[0], values[1], values[2] or None)
            return S3Credentials(f"environment {names[0]}", lambda given=given: given, float("inf"))
    if any(environment.get(name) for name in ROLES):
        return S3Credentials("AWS role", IamAwsProvider().retrieve)
    raise StoreRefused(
        "there are no credentials for the S3 store in the environment",
        remedy="set AERIE_S3_ACCESS_KEY_FILE and AERIE_S3_SECRET_KEY_FILE to files that hold them (docs/storage.md)",
    )


def _both(values: list[str], names: str) -> None:
    if not (values[0] and values[1]):
        raise StoreRefused(f"only half of the credentials is set: {names} belong together", remedy=f"set {names}")


def _from_files(access: str, secret: str, token: str) -> Credentials:
    return Credentials(_content(access), _content(secret), _content(token) if token else None)


def _content(path: str) -> str:
    try:
        text = Path(path).read_text().strip()
    except OSError as error:
        raise StoreRefused(
            f"{path} cannot be read: {error.strerror}", remedy="name a file that this process may read"
        ) from error
    if not text:
        raise StoreRefused(f"{path} is empty", remedy="put the key into that file")
    return text
