"""What an S3 store can do, tried once at start-up beyond what every store must.

Needed: a bucket that is there and lets us in, multipart uploads, encryption where it was asked for. Only told: conditional writes (the
house never relies on them), presigned downloads (else the API passes files on itself), versions (then deletions take all
of them away).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from eagle3_core.objects.keys import HOUSE_PREFIX, new_nonce
from eagle3_core.objects.probe import CONTENT, need, probe_basics
from eagle3_core.objects.protocol import Abilities, StoreUnfit
from eagle3_core.objects.s3_clients import Patience, transport

if TYPE_CHECKING:
    from eagle3_core.objects.s3 import S3Store

LEAST_PART_BYTES = 5 << 20
"""The smallest part that S3 takes, but for the last."""
PRESIGNED_S = 60


def probe_s3(store: S3Store) -> Abilities:
    """Try everything once under keys of its own. Raises StoreUnfit, StoreRefused, StoreUnavailable."""
    # A list and not a HEAD of the bucket: only an answer with a body says why it is a refusal.
    next(store.list(HOUSE_PREFIX), None)
    probe_basics(store)
    key = f"{HOUSE_PREFIX}probe/{new_nonce()}"
    try:
        _multipart(store, key)
        store.put_bytes(key, CONTENT)
        encrypted, presigned = _encrypted(store, key), _presigned(store, key)
        conditional = _refuses_a_second(store, key)  # last: a store without it has replaced the object
    finally:
        store.delete(key)
    if store.address.encryption and not encrypted:
        raise StoreUnfit(
            f"{store.address} was asked for encryption ({store.address.encryption}) and does not say that it encrypts",
            remedy="configure the store's key service, or leave sse out of the URL",
        )
    return Abilities(
        multipart=True, conditional_put=conditional, presigned=presigned, versions=store.versions, encrypted=encrypted
    )


def _multipart(store: S3Store, key: str) -> None:
    name = store.address.object_name(key)
    pieces = [b"a" * LEAST_PART_BYTES, b"b"]
    store.ask(
        f"PUT {name} in two parts",
        lambda: obstore.put(store.bulk, name, iter(pieces), chunk_size=LEAST_PART_BYTES, use_multipart=True),
    )
    need(store.stat(key).size == LEAST_PART_BYTES + 1, "multipart uploads")
    need(store.get_bytes(key, LEAST_PART_BYTES - 1, 2) == b"ab", "putting parts together in order")


def _encrypted(store: S3Store, key: str) -> bool:
    name = store.address.object_name(key)
    found = store.ask(
        f"HEAD {name}", lambda: store.client.stat_object(bucket_name=store.address.bucket, object_name=name)
    )
    return "x-amz-server-side-encryption" in {header.lower() for header in found.metadata or {}}


def _refuses_a_second(store: S3Store, key: str) -> bool:
    """Whether a `create` of a key that is there is refused, and leaves it alone."""
    try:
        obstore.put(store.bulk, store.address.object_name(key), b"other", mode="create")
    except AlreadyExistsError:
        return store.get_bytes(key) == CONTENT
    except BaseError:  # not implemented, in one way or another: nothing depends on it
        return False
    return False


def _presigned(store: S3Store, key: str) -> bool:
    """Whether a presigned URL serves its object, and not once it was changed."""
    url = store.presign(store.client, key, PRESIGNED_S, "probe")
    with transport(store.address, Patience()) as pool:
        good = store.ask("GET presigned", lambda: pool.request("GET", url))
        forged = store.ask("GET presigned", lambda: pool.request("GET", url[:-1] + ("0" if url[-1] != "0" else "1")))
    return (good.status, good.data, forged.status) == (200, CONTENT, 403)
