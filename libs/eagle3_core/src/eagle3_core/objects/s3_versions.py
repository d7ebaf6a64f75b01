"""Buckets that keep versions: a deletion there hides an object and keeps its bytes.

Hidden states reveal their text, so a deleted object must be gone, not hidden: every version and every marker of the key
is deleted by its id.
"""

from __future__ import annotations

from minio import Minio
from minio.error import MinioException

from eagle3_core.objects.s3_errors import code_and_status

NOT_THERE = {"NotImplemented", "MethodNotAllowed", "NoSuchKey"}
"""How stores without versions answer the question (501, 405)."""


def keeps_versions(client: Minio, bucket: str) -> bool:
    """Whether `bucket` keeps, or ever kept, versions. One attempt."""
    try:
        status = client.get_bucket_versioning(bucket_name=bucket).status
    except MinioException as error:
        code, number = code_and_status(error)
        if code in NOT_THERE or number in (501, 405):
            return False
        raise
    return (status or "Off") != "Off"


def delete_versions(client: Minio, bucket: str, name: str) -> None:
    """Delete every version of the object `name`. One attempt; what it left, the next one finds."""
    found = client.list_objects(bucket_name=bucket, prefix=name, recursive=True, include_version=True)
    for version in [entry for entry in found if entry.object_name == name]:
        client.remove_object(bucket_name=bucket, object_name=name, version_id=version.version_id)
