"""Database and store, saved together and restored together: `python -m aerie_api backup` and `restore`.

The order makes the two fit. A backup saves the database first and the objects after: every object that the saved database
refers to existed already, and objects never change. A restoration brings the objects back first and the database last, so
everything that the database refers to is there before it. Objects that no row refers to are garbage and are collected later.

    backups/TIME-NONCE/database      the database, as its own programs write it
    backups/TIME-NONCE/backup.json   what it is; written last, so that an unfinished backup is not taken for one
    objects/KEY                      objects, shared by all backups at one place: only new ones are copied
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from alembic.script import ScriptDirectory
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt
from sqlalchemy import URL, create_engine, text

from aerie_api.db import Database
from aerie_api.dumps import dump, load, require_empty
from aerie_api.leases.vetting import Vetting
from aerie_api.settings import Settings
from aerie_api.storage.repository import StorageRepository
from aerie_api.storage.service import OWNERS, StoreOwnedElsewhere
from eagle3_core.digests import digest_file
from eagle3_core.errors import AerieError
from eagle3_core.objects.copying import copy_missing
from eagle3_core.objects.keys import new_nonce
from eagle3_core.objects.protocol import ObjectDamaged, ObjectStore
from eagle3_core.strict_json import parse_model

BACKUPS, OBJECTS, DOCUMENT = "backups/", "objects/", "/backup.json"


class BackupMissing(AerieError):
    """There is no such backup."""

    code, status = "backup.missing", 404


class BackupUnfit(AerieError):
    """Database and this version of Aerie, or database and backup, do not fit each other."""

    code, status = "backup.unfit", 409


class Backup(BaseModel):
    """A backup that is whole."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    schema_version: Literal[1] = 1
    id: str
    made_at: float
    database: Literal["postgresql", "sqlite"]
    revision: str
    """Of the database's schema."""
    owner: str | None
    """The name under which the database owns its store."""
    dump_blake3: str
    objects: NonNegativeInt
    bytes: NonNegativeInt
    gone: NonNegativeInt
    """Objects that were collected while they were copied; nothing that a job still has."""
    damaged: list[str] = Field(default_factory=list[str])
    """Objects that were damaged already, and are not in the backup."""


class Restored(BaseModel):
    """What was brought back."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    backup: Backup
    objects: NonNegativeInt
    """Objects that had to be copied back; the others were there."""
    lost: list[str]
    """Manifests that the database names and that cannot be read whole: a retry of their jobs makes them again."""


def back_up(settings: Settings, source: ObjectStore, target: ObjectStore) -> Backup:
    """Save the database that `settings` name and its store to `target`. The house may go on working.

    Raises BackupUnfit, DumpFailed, ProgramMissing, StoreFull, StoreUnavailable.
    """
    place = settings.database
    name = _new_name()
    with tempfile.TemporaryDirectory(prefix="aerie-backup-") as folder:
        file = Path(folder) / "database"
        revision, owner = _about(place)
        dump(place, file)
        target.put_file(f"{BACKUPS}{name}/database", file)
        digest = digest_file(file)
        file.unlink()
        copied = copy_missing(source, target, Path(folder), to=OBJECTS)
    made = Backup(
        id=name, made_at=time.time(), database="postgresql" if isinstance(place, URL) else "sqlite", revision=revision,
        owner=owner, dump_blake3=digest, objects=copied.objects, bytes=copied.bytes, gone=copied.gone, damaged=copied.damaged,
    )  # fmt: skip
    target.put_bytes(f"{BACKUPS}{name}{DOCUMENT}", made.model_dump_json(indent=1).encode())
    return made


def _new_name() -> str:
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{new_nonce()}"


def backups(target: ObjectStore) -> list[Backup]:
    """The whole backups at a place, oldest first."""
    keys = [stat.key for stat in target.list(BACKUPS) if stat.key.endswith(DOCUMENT)]
    found = [parse_model(Backup, target.get_bytes(key)) for key in keys]
    return sorted(found, key=lambda backup: backup.made_at)  # names of one second sort by chance


def restore(settings: Settings, store: ObjectStore, source: ObjectStore, name: str | None = None) -> Restored:
    """Bring the backup `name` (the newest) from `source` into the empty database that `settings` name, and into `store`.

    Raises BackupMissing, BackupUnfit, DatabaseNotEmpty, StoreOwnedElsewhere, ObjectDamaged, DumpFailed, ProgramMissing.
    """
    backup, place = _chosen(source, name), settings.database
    require_empty(place)
    _check(backup, place, store)
    with tempfile.TemporaryDirectory(prefix="aerie-restore-") as folder:
        path = source.fetch(f"{BACKUPS}{backup.id}/database", Path(folder))
        if (have := digest_file(path)) != backup.dump_blake3:
            raise ObjectDamaged(
                f"the database of backup {backup.id} hashes to {have[:16]}, it was written as {backup.dump_blake3[:16]}",
                remedy="restore another backup",
            )
        copied = copy_missing(source, store, Path(folder), of=OBJECTS)
        load(place, path)
    db = Database(place)
    try:
        lost = list(_lost(db, Vetting(store)))
    finally:
        db.close()
    return Restored(backup=backup, objects=copied.copied, lost=lost)


def _chosen(source: ObjectStore, name: str | None) -> Backup:
    found = backups(source)
    chosen = next((b for b in reversed(found) if name in (None, b.id)), None)
    if chosen is None:
        there = ", ".join(backup.id for backup in found) or "none that is whole"
        raise BackupMissing(
            f"no backup {name or 'at all'} there; there is: {there}", remedy="name the place of a backup"
        )
    return chosen


def _check(backup: Backup, place: Path | URL, store: ObjectStore) -> None:
    kind = "postgresql" if isinstance(place, URL) else "sqlite"
    if backup.database != kind:
        raise BackupUnfit(f"the backup is of {backup.database}, the settings name {kind}",
                          remedy=f"set AERIE_DATABASE_URL to a {backup.database} database")  # fmt: skip
    if backup.revision not in _revisions():
        raise BackupUnfit(
            f"the backup's schema {backup.revision} is newer than this version of Aerie",
            remedy="restore with the version that made it, or a newer one",
        )
    owners = {stat.key.removeprefix(OWNERS) for stat in store.list(OWNERS)} - {backup.owner}
    if owners:
        raise StoreOwnedElsewhere(
            f"the store carries the name of another database ({', '.join(sorted(owners))}), the backup is of {backup.owner}",
            remedy="restore into a store or prefix of its own",
        )


def _about(place: Path | URL) -> tuple[str, str | None]:
    """Revision of the schema and the owner's name. Raises BackupUnfit."""
    if not isinstance(place, URL) and not place.exists():
        raise BackupUnfit(f"there is no database {place}", remedy="set AERIE_DATA_DIR or AERIE_DATABASE_URL")
    engine = create_engine(place if isinstance(place, URL) else URL.create("sqlite", database=str(place)))
    try:
        with engine.connect() as connection:
            revision = str(connection.scalar(text("SELECT version_num FROM alembic_version")))
            newest = _revisions()[0]
            if revision != newest:
                raise BackupUnfit(
                    f"the database's schema is {revision}, this version of Aerie has {newest}",
                    remedy="use the version of Aerie that serves this database",
                )
            return revision, connection.scalar(text("SELECT id FROM store_owner"))
    finally:
        engine.dispose()


def _revisions() -> list[str]:
    """Every revision that this version knows, the newest first."""
    scripts = ScriptDirectory(str(Path(__file__).parent / "migrations"))
    return [script.revision for script in scripts.walk_revisions()]


def _lost(db: Database, vetting: Vetting) -> Iterator[str]:
    with db.read() as session:
        held = StorageRepository(session).held()
    for ref in held:
        if not vetting.intact(ref):
            yield ref.key
