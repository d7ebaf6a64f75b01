"""Names of the environment that open an S3 store (`objects.s3_credentials` reads them), and an environment without them.

A process whose objects are lent to it must hold nothing that opens the store, so every name that any client of S3 knows
is taken from it, whether this house reads it or not.
"""

from __future__ import annotations

from collections.abc import Mapping

OWN = ("AERIE_S3_ACCESS_KEY", "AERIE_S3_SECRET_KEY", "AERIE_S3_SESSION_TOKEN")
OWN_FILES = tuple(f"{name}_FILE" for name in OWN)
AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
ROLES = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
_OTHERS = ("AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN")
OPENING = frozenset((*OWN, *OWN_FILES, *AWS, *ROLES, *_OTHERS))


def without_store(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a process whose objects are lent: it names no store, and holds no key to one.

    Keys stay where running servers keep states in a bucket of their own (AERIE_CAPTURE_SINKS), which the process must read.
    """
    sinks = environment.get("AERIE_CAPTURE_SINKS", "").split()
    kept_back = {"AERIE_STORE"} if any(sink.startswith("s3:") for sink in sinks) else {"AERIE_STORE", *OPENING}
    return {name: value for name, value in environment.items() if name not in kept_back}
