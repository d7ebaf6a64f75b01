"""Copies the objects that one store has and another lacks: the objects' part of a backup and of a restoration.

A key is never written twice, so a key that is present with the right size is the same object, and repeating a copy costs one
listing. Both listings come in key order and are walked side by side, so memory does not grow with the store. The key of an
attempt's object contains 16 digits of its digest; the bytes are checked against them on the way, and a damaged object is
reported and not copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from eagle3_core.digests import digest_file
from eagle3_core.objects.keys import Attempt, Owner, owner_of
from eagle3_core.objects.protocol import ObjectMissing, ObjectStore, Stat


@dataclass
class Copied:
    """What a copy found and did."""

    objects: int = 0
    """What the target has of the source now."""
    bytes: int = 0
    copied: int = 0
    """Those that it lacked before."""
    gone: int = 0
    """Those that were collected while we came to them."""
    damaged: list[str] = field(default_factory=list[str])
    """Keys whose content is not what they say; left out."""


def copy_missing(source: ObjectStore, target: ObjectStore, scratch: Path, *, of: str = "", to: str = "") -> Copied:
    """Copy what lies under `of` in `source` and has an owner to under `to` in `target`, as far as it is not there.

    `scratch` holds one object at a time. Raises StoreFull, StoreUnavailable; what was copied stays, so try again.
    """
    done, there = Copied(), target.list(to)
    beside = next(there, None)
    for stat in source.list(of):
        key = stat.key.removeprefix(of)
        if (owner := owner_of(key)) is None:
            continue
        beside = _up_to(there, beside, to + key)
        if beside is not None and (beside.key, beside.size) == (to + key, stat.size):
            done.objects, done.bytes = done.objects + 1, done.bytes + stat.size
        else:
            _copy(source, target, stat, to + key, owner, scratch, done)
    return done


def _up_to(there: Iterator[Stat], beside: Stat | None, key: str) -> Stat | None:
    while beside is not None and beside.key < key:
        beside = next(there, None)
    return beside


def _copy(
    source: ObjectStore, target: ObjectStore, stat: Stat, key: str, owner: Owner, scratch: Path, done: Copied
) -> None:
    try:
        path = source.fetch(stat.key, scratch)
    except ObjectMissing:
        done.gone += 1
        return
    try:
        if _is_what_its_key_says(path, stat.key, owner):
            target.put_file(key, path)
            done.copied, done.objects, done.bytes = done.copied + 1, done.objects + 1, done.bytes + stat.size
        else:
            done.damaged.append(stat.key)
    finally:
        if path.is_relative_to(scratch):
            path.unlink()


def _is_what_its_key_says(path: Path, key: str, owner: Owner) -> bool:
    """Whether the file hashes to the digits in its key; checkpoints carry none, and say themselves when they are read."""
    if not isinstance(owner, Attempt):
        return True
    return digest_file(path)[:16] == key.rpartition("/")[2].split("-")[2]
