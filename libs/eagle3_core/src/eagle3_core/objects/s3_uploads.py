"""Multipart uploads that began and never ended: their parts are stored, and paid for, and listed nowhere.

A killed worker leaves them behind. They are found by the time at which they began and aborted, unless the store has no
way to list them (then the bucket's own lifecycle rule must).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from minio import Minio
from minio.error import MinioException

from eagle3_core.objects.s3_address import S3Address
from eagle3_core.objects.s3_errors import code_and_status

PAGE = 1000


def abort_uploads(client: Minio, address: S3Address, older_than_s: float, ask: Callable[..., Any]) -> int:
    """Abort what began more than `older_than_s` seconds ago under the address's prefix; returns how many."""
    limit, aborted, marker = time.time() - older_than_s, 0, ("", "")
    while True:
        page = ask("LIST uploads", lambda marker=marker: _page(client, address, *marker))
        for upload in page.uploads if page is not None else []:
            if upload.initiated_time is not None and upload.initiated_time.timestamp() <= limit:
                ask(f"ABORT {upload.object_name}", lambda upload=upload: _abort(client, address.bucket, upload))
                aborted += 1
        if page is None or not page.is_truncated or not page.next_key_marker:
            return aborted
        marker = (page.next_key_marker, page.next_upload_id_marker or "")


def _page(client: Minio, address: S3Address, key_marker: str, upload_marker: str) -> Any:
    """One page of uploads; None where the store cannot list them.

    minio-py 7 has no public way to ask, 8 has none either; the pinned versions have these two methods.
    """
    try:
        return client._list_multipart_uploads(  # pyright: ignore[reportPrivateUsage]
            bucket_name=address.bucket, prefix=address.prefix, max_uploads=PAGE,
            key_marker=key_marker or None, upload_id_marker=upload_marker or None,
        )  # fmt: skip
    except MinioException as error:
        if code_and_status(error)[1] in (501, 405):
            return None
        raise


def _abort(client: Minio, bucket: str, upload: Any) -> None:
    try:
        client._abort_multipart_upload(  # pyright: ignore[reportPrivateUsage]
            bucket_name=bucket, object_name=upload.object_name, upload_id=upload.upload_id
        )
    except MinioException as error:
        if code_and_status(error)[0] != "NoSuchUpload":  # it ended meanwhile
            raise
