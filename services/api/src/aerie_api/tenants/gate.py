"""The gate that every request of people and programs passes: whose key is it, and is it their turn?

A key is looked up at every request, and again while a stream lasts, so a revoked one ends at once, everywhere. When it
was last used is noted at most once a minute: a poller must not make the database write.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from aerie_api.auth import (
    DEFAULT_TENANT,
    SCOPES,
    Caller,
    Unauthenticated,
    local,
    new_key,
    same_secret,
    secret_hash,
    take_apart,
)
from aerie_api.db import Database
from aerie_api.tables import ApiKey
from aerie_api.tenants.buckets import Buckets, Rate, Verdict
from aerie_api.tenants.repository import KeyRepository, TenantRepository, is_over
from eagle3_core.errors import AerieError

USED_STEP_S = 60.0
logger = logging.getLogger(__name__)


class TooManyRequests(AerieError):
    """The key has asked too often."""

    code, status, retryable = "rate.limited", 429, True


class BadAdminKey(AerieError):
    """The file of the first admin key holds no key."""

    code, status = "settings.admin_key", 500


class Gate:
    """Lets requests in. `required`: whether one without a key is turned away."""

    def __init__(
        self, db: Database, buckets: Buckets, rate: Rate | None, clock: Callable[[], float], *, required: bool
    ) -> None:
        self._db = db
        self._buckets = buckets
        self._rate = rate
        self._clock = clock
        self._required = required

    def admit(self, authorization: str, request_id: str) -> tuple[Caller, Verdict | None]:
        """Who sent a request, and what is left of their bucket. Raises Unauthenticated."""
        if (caller := self.without_key(authorization, request_id)) is not None:
            return caller, None
        scheme, _, text = authorization.partition(" ")
        parts = take_apart(text.strip()) if scheme.lower() == "bearer" else None
        key = self._known(*parts) if parts is not None else None
        if key is None:
            raise Unauthenticated(
                "the request carries no valid API key" if authorization else "the request carries no API key",
                remedy="send Authorization: Bearer aerie_<id>_<secret>, with a key that is neither expired nor revoked",
            )
        verdict = self._buckets.take(key.id, self._rate) if self._rate is not None else None
        return Caller(key.tenant, frozenset(key.scopes), key.id, request_id), verdict

    def without_key(self, authorization: str, request_id: str) -> Caller | None:
        """Who sent a request without a key, where none is needed. Asks nobody."""
        return local(request_id) if not authorization and not self._required else None

    def still(self, caller: Caller) -> bool:
        """Whether `caller`, who was let in before, would be let in now."""
        if caller.key_id is None:
            return True
        with self._db.read() as session:
            key = KeyRepository(session).find(caller.key_id)
        return key is not None and not is_over(key, self._clock())

    def _known(self, key_id: str, secret: str) -> ApiKey | None:
        now = self._clock()
        with self._db.read() as session:
            key = KeyRepository(session).find(key_id)
        if key is None or not same_secret(secret, key.secret_hash) or is_over(key, now):
            return None
        if key.last_used_at is None or key.last_used_at <= now - USED_STEP_S:
            with self._db.write() as session:
                KeyRepository(session).locked(key_id).last_used_at = now
        return key

    def make_first_key(self, file: Path) -> None:
        """Have an admin key: the one in `file`, or, if nobody has one yet, a new one, written there. Raises BadAdminKey."""
        given = file.read_text().strip() if file.exists() else None
        if given is not None and take_apart(given) is None:
            raise BadAdminKey(
                f"{file} holds no API key", remedy="it must hold aerie_<16 hex digits>_<43 characters>, or be absent"
            )
        now = self._clock()
        with self._db.write() as session:
            TenantRepository(session).locked(DEFAULT_TENANT)  # one process after the other
            keys = KeyRepository(session)
            if given is None:
                if keys.any_admin(now) or not self._required:
                    return
                _, given, _ = new_key()
                _write_private(file, given)
                logger.warning("no admin key yet: wrote one to %s", file)
            parts = take_apart(given)
            assert parts is not None
            if keys.find(parts[0]) is None:
                session.add(_admin_key(parts[0], secret_hash(parts[1]), now))


def _admin_key(key_id: str, hashed: str, now: float) -> ApiKey:
    return ApiKey(
        id=key_id, tenant=DEFAULT_TENANT, name="first admin", secret_hash=hashed, scopes=list(SCOPES), created_at=now,
        expires_at=None, revoked_at=None, last_used_at=None,
    )  # fmt: skip


def _write_private(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(text + "\n")
