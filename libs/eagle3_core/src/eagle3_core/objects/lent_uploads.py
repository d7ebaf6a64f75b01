"""A large object goes up in parts that are signed one by one, each when its turn has come, so that none is late.

A few parts are under way at once, a piece of each in memory. A broken part is sent again without the others; an upload that
cannot end is aborted, and one whose abortion fails too is found later by its age (`objects.s3_uploads`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from html import escape, unescape
from typing import TYPE_CHECKING, Any

from urllib3.exceptions import HTTPError

from eagle3_core.errors import AerieError
from eagle3_core.jobs.wire import ObjectAsk
from eagle3_core.objects.lent_http import Part, Wire
from eagle3_core.objects.s3_errors import Answered, Cut

if TYPE_CHECKING:
    from eagle3_core.objects.lent import Asks

PART_BYTES = 32 << 20
STREAMS = 4
Ask = Callable[[str, Callable[[], Any]], Any]


def upload(desk: Asks, wire: Wire, key: str, parts: Sequence[Part], ask: Ask, whole: Callable[[], bool]) -> None:
    """Write `parts`, in order, as the object `key`. `whole` says whether it is there, should an answer have been lost."""
    begun = ask(f"POST {key}?uploads", lambda: wire.send("POST", desk.ask(ObjectAsk(do="begin", key=key))).data)
    found = re.search(rb"<UploadId>([^<]+)</UploadId>", begun)
    if found is None:
        raise Cut(f"the answer to the beginning of an upload of {key} names none")
    upload_id = unescape(found[1].decode())

    def one(number: int) -> str:
        wanted = ObjectAsk(do="part", key=key, upload_id=upload_id, part=number)
        what = f"PUT {key} part {number} of {len(parts)}"
        return ask(what, lambda: _etag(wire.send("PUT", desk.ask(wanted), parts[number - 1]).headers.get("ETag", "")))

    try:
        with ThreadPoolExecutor(min(STREAMS, len(parts)), "upload") as streams:
            sent = [streams.submit(one, number) for number in range(1, len(parts) + 1)]
            try:
                etags = [part.result() for part in sent]
            except BaseException:
                for waiting in sent:
                    waiting.cancel()
                raise
        _end(desk, wire, ObjectAsk(do="end", key=key, upload_id=upload_id), etags, ask, whole)
    except BaseException:
        with suppress(AerieError, Answered, HTTPError, OSError):  # the store's housekeeping finds it by its age
            wire.send("DELETE", desk.ask(ObjectAsk(do="abort", key=key, upload_id=upload_id)))
        raise


def _etag(etag: str) -> str:
    if not etag:
        raise Cut("the answer to a part carries no ETag")
    return etag


def _end(
    desk: Asks, wire: Wire, wanted: ObjectAsk, etags: Sequence[str], ask: Ask, whole: Callable[[], bool]
) -> None:  # fmt: skip
    listed = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
        for number, etag in enumerate(etags, start=1)
    )
    body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
    tries = 0

    def end() -> None:
        nonlocal tries
        tries += 1
        if tries > 1 and _there(whole):
            return  # the answer to the end was lost, not the end
        answer = wire.send("POST", desk.ask(wanted), Part(body, 0, len(body))).data
        if b"<Error>" in answer:  # S3 may say 200 before it knows
            raise Answered(500, answer)

    ask(f"POST {wanted.key}?uploadId", end)


def _there(whole: Callable[[], bool]) -> bool:
    try:
        return whole()
    except Answered as refusal:
        if refusal.status == 404:
            return False
        raise
