"""Any S3 store behind the house's protocol: MinIO, AWS, Ceph, SeaweedFS, versitygw, ...

Every request here is idempotent (keys are never reused, so a write that is repeated writes the same bytes), which is why
all of them may be repeated after a 503, a reset, a half answer or a silence. Nothing rests on conditional writes: what
counts is decided by a database row and a manifest, and a reader checks size and BLAKE3.

Small objects carry their digest as metadata and are checked against it whenever they are read whole. Large ones go up
in parts of which a few are in memory at once.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import obstore
from minio import Minio
from minio.error import S3Error

from eagle3_core.digests import digest_bytes
from eagle3_core.jobs.wire import ObjectAnswer, ObjectAsk
from eagle3_core.objects.protocol import Abilities, ObjectMissing, Stat
from eagle3_core.objects.retry import Retries
from eagle3_core.objects.s3_address import S3Address, s3_address
from eagle3_core.objects.s3_clients import Patience, bulk_client, control_client, encryption_of
from eagle3_core.objects.s3_credentials import S3Credentials, credentials_in
from eagle3_core.objects.s3_errors import verdict
from eagle3_core.objects.s3_lend import lend
from eagle3_core.objects.s3_list import Listing
from eagle3_core.objects.s3_probe import probe_s3
from eagle3_core.objects.s3_read import DIGEST_HEADER, PART_BYTES, Opener, copy_in, download, read_bytes
from eagle3_core.objects.s3_uploads import abort_uploads
from eagle3_core.objects.s3_versions import delete_versions, keeps_versions

Result = TypeVar("Result")
SMALL_BYTES = 1 << 20
"""Objects up to this size go through minio-py with their digest."""
PARTS_IN_MEMORY = 4
MOST_PARTS = 9_000
"""S3 takes 10,000."""


class S3Store:
    """Objects in one bucket, under one prefix. Safe for many threads and processes."""

    def __init__(
        self, address: S3Address, credentials: S3Credentials, *, retries: Retries | None = None,
        patience: Patience | None = None, part_bytes: int = PART_BYTES, url: str = "",
    ) -> None:  # fmt: skip
        """`url` is what `store_at` opens the same store by, in another process with the same environment."""
        self.url = url
        self.address = address
        self.credentials = credentials
        self.client = control_client(address, credentials, patience or Patience())
        self.bulk = bulk_client(address, credentials, patience or Patience())
        self._retries = retries or Retries()
        self._part_bytes = part_bytes
        self.encryption = encryption_of(address)
        self._public = self._for_public(credentials, patience or Patience())
        self._versions: bool | None = None

    def __repr__(self) -> str:
        return f"S3Store({self.address})"

    def _for_public(self, credentials: S3Credentials, patience: Patience) -> Minio:
        if not self.address.public:
            return self.client
        scheme, _, host = self.address.public.rstrip("/").partition("://")
        outside = dataclasses.replace(self.address, host=host, tls=scheme == "https")
        return control_client(outside, credentials, patience)

    def ask(self, what: str, work: Callable[[], Result]) -> Result:
        """What `work` returns, asked again where that may help. Raises the store's errors, typed; `what` names the request."""
        return self._retries(work, lambda failure: verdict(failure, f"{what} in {self.address}"))

    # -- writing

    def put_bytes(self, key: str, data: bytes | memoryview) -> None:
        """Write `data` under `key`."""
        name = self.address.object_name(key)
        if len(data) > SMALL_BYTES:
            return self._put_bulk(name, data, len(data))
        digest = {DIGEST_HEADER: digest_bytes(data)}

        def put() -> None:
            self.client.put_object(
                bucket_name=self.address.bucket, object_name=name, data=io.BytesIO(data), length=len(data),
                metadata=dict(digest), sse=self.encryption,
            )  # fmt: skip

        self.ask(f"PUT {name}", put)

    def put_file(self, key: str, path: Path) -> None:
        """Copy the file `path` under `key`."""
        size = path.stat().st_size
        if size <= SMALL_BYTES:
            return self.put_bytes(key, path.read_bytes())
        self._put_bulk(self.address.object_name(key), path, size)

    def _put_bulk(self, name: str, source: Path | bytes | memoryview, size: int) -> None:
        part = max(self._part_bytes, -(-size // MOST_PARTS))
        attempts = 0

        def put() -> None:
            nonlocal attempts
            attempts += 1
            if attempts > 1 and self._size(name) == size:
                return  # the answer to an upload's end was lost, not the end
            obstore.put(self.bulk, name, source, chunk_size=part, max_concurrency=PARTS_IN_MEMORY)

        self.ask(f"PUT {name} ({size} bytes)", put)

    def _size(self, name: str) -> int | None:
        """One attempt at the size of the object `name`; None where there is none."""
        try:
            return self.client.stat_object(bucket_name=self.address.bucket, object_name=name).size
        except S3Error as error:
            if error.response.status == 404:
                return None
            raise

    # -- reading

    def get_bytes(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Read `length` bytes from `start`, or to the end."""
        name = self.address.object_name(key)
        return self.ask(f"GET {name}", lambda: self._read(name, start, length))

    def _read(self, name: str, start: int, length: int | None) -> bytes:
        if length == 0:
            self.client.stat_object(bucket_name=self.address.bucket, object_name=name)
            return b""
        return read_bytes(self.opened(name), start, length)

    def fetch(self, key: str, folder: Path) -> Path:
        """A copy of the object in `folder`; one that lies there already is taken as it is."""
        name = self.address.object_name(key)
        target = copy_in(folder, name)
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            download(self.opened(name), name, self.stat(key).size, target, self.ask)
        return target

    def stat(self, key: str) -> Stat:
        """Size and time of `key`."""
        name = self.address.object_name(key)
        found = self.ask(
            f"HEAD {name}", lambda: self.client.stat_object(bucket_name=self.address.bucket, object_name=name)
        )
        return Stat(key, found.size or 0, found.last_modified.timestamp() if found.last_modified else 0.0)

    def list(self, prefix: str, after: str = "") -> Iterator[Stat]:
        """Objects whose key starts with `prefix` and comes after `after`, in key order."""
        listing = Listing(self.client, self.address, prefix, after)
        while page := self.ask(f"LIST {prefix}*", listing.page):
            yield from page

    # -- the rest

    def delete(self, key: str) -> None:
        """Remove `key` if it is there, with every older version of it that the bucket keeps."""
        name = self.address.object_name(key)
        with suppress(ObjectMissing):  # a server may say so to the second try, where the first one's answer was lost
            if self.versions:
                self.ask(f"DELETE {name}", lambda: delete_versions(self.client, self.address.bucket, name))
            else:
                self.ask(
                    f"DELETE {name}",
                    lambda: self.client.remove_object(bucket_name=self.address.bucket, object_name=name),
                )

    @property
    def versions(self) -> bool:
        """Whether the bucket keeps deleted objects as versions; asked once."""
        if self._versions is None:
            self._versions = self.ask("GET versioning", lambda: keeps_versions(self.client, self.address.bucket))
        return self._versions

    def free_bytes(self) -> int | None:
        """None: S3 does not say."""
        return None

    def download_url(self, key: str, expires_s: int, filename: str) -> str:
        """A presigned URL for `key`, made without asking the server."""
        return self.presign(self._public, key, expires_s, filename)

    def presign(self, client: Minio, key: str, expires_s: int, filename: str) -> str:
        """A URL for `key`, signed by `client` for the host that it speaks to."""
        disposition = f"attachment; filename*=UTF-8''{quote(filename, safe='')}"
        return client.presigned_get_object(
            bucket_name=self.address.bucket, object_name=self.address.object_name(key),
            expires=timedelta(seconds=expires_s), response_headers={"response-content-disposition": disposition},
        )  # fmt: skip

    def lend(self, ask: ObjectAsk, lasts_s: int) -> ObjectAnswer:
        """One signed request, or what only the owner of a key can ask (a list, a deletion)."""
        return lend(self, ask, lasts_s)

    def opened(self, name: str) -> Opener:
        """One attempt at a range of the object `name` of the bucket, however often it is called."""
        return lambda start, length: self.client.get_object(
            bucket_name=self.address.bucket, object_name=name, offset=start, length=length or 0
        )

    def abort_stale_uploads(self, older_than_s: float) -> int:
        """Abort multipart uploads under the prefix that began so long ago."""
        return abort_uploads(self.client, self.address, older_than_s, self.ask)

    def probe(self) -> Abilities:
        """Try everything once. Raises StoreUnfit, StoreRefused, StoreUnavailable."""
        return probe_s3(self)


def s3_store(url: str, environment: Mapping[str, str] = os.environ) -> S3Store:
    """The store at `url`, with the credentials of `environment`. Raises BadStoreUrl, StoreRefused."""
    return S3Store(s3_address(url), credentials_in(environment), url=url)
