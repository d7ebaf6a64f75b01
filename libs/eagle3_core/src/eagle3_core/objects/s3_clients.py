"""The two clients of a store, made alike: minio-py for control and reads, obstore for bulk writes.

obstore because a write is bound by hashing: it sends payloads unsigned over TLS, where minio-py digests every byte (MD5
over TLS, SHA-256 without). Over a plain network that was allowed by name payloads
are signed, because nothing else there would notice a changed byte before a reader does.

Neither client retries on its own where a retry would hide what happened: minio-py not at all, obstore a few times a part,
since a part is the smallest thing worth sending again.
"""

from __future__ import annotations

import os
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import certifi
import urllib3
from minio import Minio
from minio.sse import Sse, SseKMS, SseS3
from obstore.store import S3Store as BulkStore

from eagle3_core.objects.s3_address import S3Address
from eagle3_core.objects.s3_credentials import S3Credentials

CONNECTIONS = 32


@dataclass(frozen=True)
class Patience:
    """How long one request may take."""

    connect_s: float = 5.0
    read_s: float = 60.0
    """Longest silence in an answer."""
    part_s: float = 300.0
    """Longest time that sending one part may take: 16 MiB at half a megabit a second."""
    part_retries: int = 4
    """How often a part is sent again before the whole object is."""
    part_pause_s: float = 0.2
    """Pause before that; doubles, with jitter."""


def control_client(address: S3Address, credentials: S3Credentials, patience: Patience) -> Minio:
    """minio-py, without retries of its own."""
    client = Minio(
        endpoint=address.host, credentials=credentials, secure=address.tls, region=address.region,
        http_client=transport(address, patience),
    )  # fmt: skip
    if not address.virtual_host:
        client.disable_virtual_style_endpoint()
    return client


def transport(address: S3Address, patience: Patience) -> urllib3.PoolManager:
    """Connections to the server: certificates checked, no retries, through the proxy that the environment wants."""
    return connections(patience, proxy_for(address))


def connections(patience: Patience, proxy: str | None, **more: Any) -> urllib3.PoolManager:
    """Such connections through `proxy`, or directly."""
    options: dict[str, Any] = {
        "timeout": urllib3.Timeout(connect=patience.connect_s, read=patience.read_s),
        "maxsize": CONNECTIONS,
        "retries": False,
        "cert_reqs": "CERT_REQUIRED",
        "ca_certs": os.environ.get("SSL_CERT_FILE") or certifi.where(),
        **more,
    }
    return urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)


def bulk_client(address: S3Address, credentials: S3Credentials, patience: Patience) -> BulkStore:
    """obstore, with a few retries for each part."""
    proxy = proxy_for(address)
    options: dict[str, Any] = {
        "allow_http": not address.tls,
        "connect_timeout": timedelta(seconds=patience.connect_s),
        "read_timeout": timedelta(seconds=patience.read_s),
        "timeout": timedelta(seconds=patience.part_s),
        # A proxy given here keeps it from looking for one in the environment by other rules than `proxy_for`.
        "proxy_url": proxy or "http://127.0.0.1:9",
        **({} if proxy else {"proxy_excludes": address.hostname}),
    }
    if (authority := os.environ.get("SSL_CERT_FILE")) and address.tls:
        options["root_certificate"] = Path(authority).read_bytes()
    encryption: dict[str, Any] = {}
    if address.encryption == "AES256":
        encryption = {"server_side_encryption": "AES256"}
    elif address.encryption:
        key = address.encryption.removeprefix("aws:kms:")
        encryption = {"server_side_encryption": "aws:kms", "sse_kms_key_id": key}
    host = f"{address.bucket}.{address.host}" if address.virtual_host else address.host
    return BulkStore(
        address.bucket,
        endpoint=f"{'https' if address.tls else 'http'}://{host}",
        region=address.region,
        virtual_hosted_style_request=address.virtual_host,
        unsigned_payload=address.trusted,
        credential_provider=cast("Any", credentials.for_obstore),
        client_options=cast("Any", options),
        retry_config={
            "max_retries": patience.part_retries,
            "retry_timeout": timedelta(seconds=patience.part_s),
            "backoff": {"init_backoff": timedelta(seconds=patience.part_pause_s), "max_backoff": timedelta(seconds=10)},
        },
        **encryption,
    )


def encryption_of(address: S3Address) -> Sse | None:
    """What minio-py is to ask of the server for every object."""
    if not address.encryption:
        return None
    return SseS3() if address.encryption == "AES256" else SseKMS(address.encryption.removeprefix("aws:kms:"), {})


def proxy_for(address: S3Address) -> str | None:
    """The proxy that the environment wants for the server; none for this machine."""
    return proxy_of(address.hostname, tls=address.tls, loopback=address.loopback)


def proxy_of(hostname: str, *, tls: bool, loopback: bool) -> str | None:
    """The same for a server by its name."""
    if loopback or urllib.request.proxy_bypass(hostname):
        return None
    return urllib.request.getproxies().get("https" if tls else "http")
