"""What a store's owner signs for a unit's process that has no key to the store: one request for one object, for a while.

Only requests that the object protocol needs can be asked for; what a process may ask them of is not decided here.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from eagle3_core.jobs.wire import ObjectAnswer, ObjectAsk, Stored
from eagle3_core.objects.protocol import BadKey
from eagle3_core.objects.s3_list import PAGE_KEYS
from eagle3_core.objects.s3_presign import LONGEST_S, presigned
from eagle3_core.objects.s3_read import DIGEST_HEADER

if TYPE_CHECKING:
    from eagle3_core.objects.s3 import S3Store

METHODS = {"get": "GET", "put": "PUT", "begin": "POST", "part": "PUT", "end": "POST", "abort": "DELETE"}
"""The request that each kind of ask is."""
FOUND_AT_ONCE = PAGE_KEYS
"""Objects that one answer to `list` names: as many as one page of the store's own."""


def lend(store: S3Store, ask: ObjectAsk, lasts_s: int) -> ObjectAnswer:
    """What `ask` wants: a signed request, a part of a list, or that an object is gone.

    Raises BadKey, and what the store raises when it is asked itself (`list`, `delete`).
    """
    if ask.do == "list":
        return _found(store, ask)
    if ask.do == "delete":
        store.delete(ask.key)
        return ObjectAnswer()
    address, lasts_s = store.address, min(lasts_s, LONGEST_S)
    headers = _headers(store, ask)
    url = presigned(
        METHODS[ask.do], address.object_url(ask.key), address.region, store.credentials.retrieve(), lasts_s,
        query=_query(ask), headers=headers,
    )  # fmt: skip
    return ObjectAnswer(url=url, headers=headers, lasts_s=lasts_s)


def _query(ask: ObjectAsk) -> dict[str, str]:
    if ask.do == "begin":
        return {"uploads": ""}
    if ask.do not in ("part", "end", "abort"):
        return {}
    if ask.upload_id is None or (ask.do == "part") != (ask.part is not None):
        raise BadKey(f"{ask.do} of {ask.key} does not say which upload or part", remedy="name both")
    return {"uploadId": ask.upload_id} | ({"partNumber": str(ask.part)} if ask.part is not None else {})


def _headers(store: S3Store, ask: ObjectAsk) -> dict[str, str]:
    """Headers that the request must carry as they are."""
    if ask.do not in ("put", "begin"):
        return {}
    digest = {DIGEST_HEADER: ask.blake3} if ask.blake3 is not None else {}
    return digest | (store.encryption.headers() if store.encryption is not None else {})


def _found(store: S3Store, ask: ObjectAsk) -> ObjectAnswer:
    page = islice(store.list(ask.key, ask.after), FOUND_AT_ONCE)
    found = [Stored(key=stat.key, size=stat.size, modified=stat.modified) for stat in page]
    return ObjectAnswer(found=found, more=len(found) == FOUND_AT_ONCE)
