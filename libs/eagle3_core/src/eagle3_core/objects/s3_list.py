"""A listing that survives failures: a page that did not come whole is asked for again from where the last one ended."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from minio import Minio

from eagle3_core.objects.protocol import Stat
from eagle3_core.objects.s3_address import S3Address
from eagle3_core.objects.s3_errors import Cut

PAGE_KEYS = 1000


class Listing:
    """The objects under a prefix, page by page, or those behind the key `after`."""

    def __init__(self, client: Minio, address: S3Address, prefix: str, after: str = "") -> None:
        self._client, self._address, self._prefix = client, address, prefix
        self._rest: Iterator[Stat] | None = None
        self._last = after

    def page(self) -> list[Stat]:
        """The next objects, empty at the end. One attempt; after a failure the next one begins behind the last page."""
        if self._rest is None:
            self._rest = self._after(self._last)
        try:
            found = list(islice(self._rest, PAGE_KEYS))
        except (ValueError, TypeError) as error:  # what minio-py makes of a page that is no list
            self._rest = None
            raise Cut(f"the list cannot be read: {error}") from error
        except BaseException:
            self._rest = None
            raise
        if found:
            self._last = found[-1].key
        return found

    def _after(self, last: str) -> Iterator[Stat]:
        inside = self._address.prefix
        listing = self._client.list_objects(
            bucket_name=self._address.bucket, prefix=inside + self._prefix, recursive=True,
            start_after=inside + last if last else None,
        )  # fmt: skip
        for entry in listing:
            key = (entry.object_name or "")[len(inside) :]
            if not entry.is_dir and key > last:  # some servers do not know `start-after`
                yield Stat(key, entry.size or 0, entry.last_modified.timestamp() if entry.last_modified else 0.0)
