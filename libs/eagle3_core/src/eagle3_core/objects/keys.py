"""What a key says: whose it is and which attempt wrote it. The only place that makes keys or takes them apart.

    TENANT/STAGE/JOB/UNIT/FENCE-NONCE-DIGEST-NAME    a file of one attempt at one unit
    TENANT/checkpoints/UNITKEY/STEP-FENCE-...        a checkpoint; any attempt at the unit may go on from it
    _aerie/...                                       notes of the house itself, never data

A key is written by one attempt and by no other, ever: the fence grows with every claim, and the nonce tells apart units
that were planned twice and attempts that share a place. So once an attempt is over, none of its uncommitted keys can
become data any more, which is what lets the collector delete them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from eagle3_core.jobs.graph import STAGES

HOUSE_PREFIX = "_aerie/"
CHECKPOINTS = "checkpoints"
_FILE = re.compile(r"(\d{1,18})-.+")
_CHECKPOINT = re.compile(r"(\d{1,18})-(\d{1,18})-(?:(complete\.json)|[0-9a-f]{16}-state\.safetensors)")


@dataclass(frozen=True)
class Attempt:
    """One attempt at one unit, as its keys name it."""

    tenant: str
    stage: str
    job_id: str
    unit: int
    fence: int

    @property
    def prefix(self) -> str:
        """What all its keys start with."""
        return f"{self.tenant}/{self.stage}/{self.job_id}/{self.unit:05d}/{self.fence:06d}-"


@dataclass(frozen=True)
class Training:
    """One training unit, whoever attempts it: what checkpoints belong to."""

    tenant: str
    unit_key: str

    @property
    def prefix(self) -> str:
        """What all its checkpoints' keys start with."""
        return f"{self.tenant}/{CHECKPOINTS}/{self.unit_key}/"


Owner = Attempt | Training


def new_nonce() -> str:
    """Eight hex digits that no other writer has."""
    return secrets.token_hex(4)


def owner_of(key: str) -> Owner | None:
    """Whose key it is; None for notes of the house and for what is not ours."""
    parts = key.split("/")
    if key.startswith(HOUSE_PREFIX):
        return None
    if len(parts) == 4 and parts[1] == CHECKPOINTS:
        return Training(parts[0], parts[2])
    if len(parts) != 5 or parts[1] not in STAGES or not re.fullmatch(r"\d{1,18}", parts[3]):
        return None
    if (file := _FILE.fullmatch(parts[4])) is None:
        return None
    return Attempt(parts[0], parts[1], parts[2], int(parts[3]), int(file[1]))


@dataclass(frozen=True)
class CheckpointFile:
    """One of a checkpoint's two files: its tensors, or the marker without which they do not count."""

    step: int
    fence: int
    marker: bool


def checkpoint_file(key: str) -> CheckpointFile | None:
    """What a key below `Training.prefix` is; None for what is no checkpoint's."""
    if (found := _CHECKPOINT.fullmatch(key.rpartition("/")[2])) is None:
        return None
    return CheckpointFile(int(found[1]), int(found[2]), found[3] is not None)


def foreign(keys: Sequence[str], attempt: Attempt) -> list[str]:
    """Those of `keys` that `attempt` may not have written."""
    return [key for key in keys if owner_of(key) != attempt]
