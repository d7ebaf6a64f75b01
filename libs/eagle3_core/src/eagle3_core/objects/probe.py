"""What every store must do, tried once at start-up, so that a store that cannot do it is refused now and not during a job.

put, read back whole and in part, list at once what was written, delete, and find it gone
"""

from __future__ import annotations

from eagle3_core.objects.keys import HOUSE_PREFIX, new_nonce
from eagle3_core.objects.protocol import ObjectMissing, ObjectStore, StoreUnfit

CONTENT = b"0123456789abcdef"


def probe_basics(store: ObjectStore) -> None:
    """Raise StoreUnfit unless `store` reads, ranges, lists and deletes what was just written."""
    key = f"{HOUSE_PREFIX}probe/{new_nonce()}"
    store.put_bytes(key, CONTENT)
    try:
        need(store.get_bytes(key) == CONTENT, "reading back what was written")
        need(store.get_bytes(key, 4, 6) == CONTENT[4:10], "reading a range")
        need(store.stat(key).size == len(CONTENT), "telling an object's size")
        need([found.key for found in store.list(key)] == [key], "listing an object right after it was written")
    finally:
        store.delete(key)
    need(_gone(store, key), "deleting")
    need(not list(store.list(key)), "listing right after a deletion")


def need(works: bool, what: str) -> None:
    """Raise StoreUnfit that names `what` unless it works."""
    if not works:
        raise StoreUnfit(f"the object store fails at {what}", remedy="use another store, or correct its configuration")


def _gone(store: ObjectStore, key: str) -> bool:
    try:
        store.stat(key)
    except ObjectMissing:
        return True
    return False
