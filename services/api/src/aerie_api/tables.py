"""What the database holds. It is the truth about every job; queues and workers only hear of it.

Times are seconds since the epoch (float). Every row that belongs to someone carries its tenant. A unit's `fence`
grows with every claim; who holds the fence's token may write, nobody else.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, String, false, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

LIVING = ("queued", "running", "paused", "cancelling")
_LIVING_SQL = text("status IN ('queued', 'running', 'paused', 'cancelling')")
_QUEUED_SQL, _RUNNING_SQL = text("state = 'queued'"), text("state = 'running'")
_OWED_SQL = text("state = 'queued' AND rung_at IS NULL")
Document = dict[str, Any]


class Base(DeclarativeBase):
    """All tables."""

    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's way to map types
        Document: JSON(none_as_null=True),
        list[str]: JSON(none_as_null=True),
        dict[str, str]: JSON(none_as_null=True),
    }


class Job(Base):
    """A job as posted, and where it stands."""

    __tablename__ = "jobs"
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(64))
    rank: Mapped[int] = mapped_column(default=0, server_default="0")
    """Minus the priority that was asked for: of two jobs of a tenant the lower rank goes first."""
    status: Mapped[str] = mapped_column(String(16))
    stage: Mapped[str | None] = mapped_column(String(16))
    spec: Mapped[Document]
    sources: Mapped[dict[str, str]]
    warnings: Mapped[list[str]]
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    reason: Mapped[Document | None]
    figures: Mapped[Document | None]
    """What the finished job found: verdict, acceptance length, digest."""
    version: Mapped[int] = mapped_column(default=1)
    """Grows with every change that a reader could see."""
    event_seq: Mapped[int] = mapped_column(default=0)
    log_seq: Mapped[int] = mapped_column(default=0)

    __table_args__ = (
        Index("uq_jobs_living_name", "tenant", "name", unique=True,
              sqlite_where=_LIVING_SQL, postgresql_where=_LIVING_SQL),
        Index("ix_jobs_tenant_status", "tenant", "status", "number"),
        {"sqlite_autoincrement": True},
    )  # fmt: skip


class StageRow(Base):
    """One stage of a job."""

    __tablename__ = "stages"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), server_default=text("''"))
    name: Mapped[str] = mapped_column(String(16), primary_key=True)
    position: Mapped[int]
    queue: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    planned_at: Mapped[float | None]
    """When its units were made; null before."""
    result: Mapped[Document | None]
    reason: Mapped[Document | None]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]


class Unit(Base):
    """What a worker leases: a whole stage or a slice of one."""

    __tablename__ = "units"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    job_number: Mapped[int]
    rank: Mapped[int] = mapped_column(default=0, server_default="0")
    """Its job's."""
    stage: Mapped[str] = mapped_column(String(16))
    position: Mapped[int]
    queue: Mapped[str] = mapped_column(String(16))
    index: Mapped[int] = mapped_column("unit_index")
    start: Mapped[int] = mapped_column("unit_start")
    stop: Mapped[int] = mapped_column("unit_stop")
    of: Mapped[int] = mapped_column("unit_of")
    key: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    fence: Mapped[int] = mapped_column(default=0)
    attempt: Mapped[int] = mapped_column(default=0)
    failures: Mapped[int] = mapped_column(default=0)
    losses: Mapped[int] = mapped_column(default=0)
    preemptions: Mapped[int] = mapped_column(default=0)
    not_before: Mapped[float] = mapped_column(default=0.0)
    rung_at: Mapped[float | None]
    """When the doorbell was rung for it; null while it still has to be (see `leases.outbox`)."""
    worker_id: Mapped[str | None] = mapped_column(String(128))
    incarnation: Mapped[str | None] = mapped_column(String(128))
    lease_expires_at: Mapped[float | None]
    last_heartbeat: Mapped[float | None]
    progress: Mapped[Document | None]
    moved_at: Mapped[float | None]
    """When the running attempt last got on: a new progress or a new value of a curve (see `leases.watchdog`)."""
    longest_step_s: Mapped[float | None]
    """The longest time that the running attempt has taken between two such moves."""
    manifest: Mapped[Document | None]
    result: Mapped[Document | None]
    reused_from: Mapped[str | None] = mapped_column(String(64))
    """The job whose result this unit took over without running."""
    released_at: Mapped[float | None]
    """When the objects behind its manifest were given up; a retry makes them again."""
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    seconds: Mapped[float | None]

    __table_args__ = (
        Index("uq_units_place", "job_id", "stage", "unit_index", unique=True),
        Index("ix_units_queue", "state", "queue", "not_before"),
        Index("ix_units_lease", "state", "lease_expires_at"),
        Index("ix_units_worker", "worker_id"),
        Index("ix_units_owed", "not_before", sqlite_where=_OWED_SQL, postgresql_where=_OWED_SQL),
        Index(
            "ix_units_turn",
            "tenant",
            "queue",
            "rank",
            "job_number",
            "position",
            "unit_index",
            sqlite_where=_QUEUED_SQL,
            postgresql_where=_QUEUED_SQL,
        ),
        Index("ix_units_running", "tenant", "queue", sqlite_where=_RUNNING_SQL, postgresql_where=_RUNNING_SQL),
        Index("ix_units_served", "tenant", "started_at"),
    )


class Attempt(Base):
    """One attempt at a unit, kept after its end: who tried, how it ended."""

    __tablename__ = "attempts"
    unit_id: Mapped[str] = mapped_column(ForeignKey("units.id", ondelete="CASCADE"), primary_key=True)
    fence: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), server_default=text("''"))
    attempt: Mapped[int]
    token_hash: Mapped[str] = mapped_column(String(64))
    worker_id: Mapped[str] = mapped_column(String(128))
    incarnation: Mapped[str] = mapped_column(String(128))
    gpus: Mapped[int] = mapped_column(default=0, server_default="0")
    """How many its worker has; they count against the tenant's GPU-hours while it runs."""
    started_at: Mapped[float]
    ended_at: Mapped[float | None]
    cause: Mapped[str | None] = mapped_column(String(16))
    """Null while it runs, `committed`, or a `Cause`."""
    problem: Mapped[Document | None]
    blames_worker: Mapped[bool] = mapped_column(default=False, server_default=false())
    """Whether it ended in a way that says something about its worker (see `leases.worker_health`)."""

    __table_args__ = (Index("ix_attempts_worker", "worker_id", "ended_at"),)


class CommitRow(Base):
    """The result cache: what a key's unit made, whoever ran it first."""

    __tablename__ = "commits"
    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    stage: Mapped[str] = mapped_column(String(16))
    manifest: Mapped[Document]
    result: Mapped[Document]
    job_id: Mapped[str] = mapped_column(String(64), index=True)
    created_at: Mapped[float]
    bytes: Mapped[int | None] = mapped_column(BigInteger)
    """What its objects hold; null until measured."""
    last_used_at: Mapped[float | None]
    """When a job last took it over; null: never since it was made."""
    sources: Mapped[Document | None]
    """Digests of what its job read, by URI: the job itself may be removed. Null where it was made before they were kept."""

    __table_args__ = (Index("ix_commits_bytes", "tenant", "stage", "bytes"),)


class Event(Base):
    """Something that happened to a job, in order."""

    __tablename__ = "events"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), server_default=text("''"))
    seq: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    type: Mapped[str] = mapped_column(String(32))
    level: Mapped[str] = mapped_column(String(8))
    message: Mapped[str]
    data: Mapped[Document]


class LogRow(Base):
    """A line that a unit's attempt said."""

    __tablename__ = "logs"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), server_default=text("''"))
    seq: Mapped[int] = mapped_column(primary_key=True)
    stage: Mapped[str] = mapped_column(String(16))
    unit: Mapped[int]
    attempt: Mapped[int]
    at: Mapped[float]
    level: Mapped[str] = mapped_column(String(8))
    text: Mapped[str]


class MetricRow(Base):
    """One value of one curve; a resumed attempt overwrites what it measures again."""

    __tablename__ = "metrics"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), server_default=text("''"))
    stage: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    unit: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float | None]
    """Null where the stage measured NaN or an infinity."""
    at: Mapped[float]


class IdempotencyRow(Base):
    """The answer that a request's Idempotency-Key stands for."""

    __tablename__ = "idempotency"
    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    body_hash: Mapped[str] = mapped_column(String(64))
    owner: Mapped[str] = mapped_column(String(32))
    """Who does the work: an answer is kept only of the newest owner."""
    response: Mapped[Document | None]
    """Null while the first request is under way."""
    created_at: Mapped[float] = mapped_column(index=True)


class Worker(Base):
    """A worker that asked for work."""

    __tablename__ = "workers"
    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    incarnation: Mapped[str] = mapped_column(String(128))
    queues: Mapped[list[str]]
    first_seen: Mapped[float]
    last_seen: Mapped[float]
    set_aside: Mapped[Document | None]
    """The problem for which it gets no more work, until a person readmits it."""
    set_aside_at: Mapped[float | None]
    readmitted_at: Mapped[float] = mapped_column(default=0.0, server_default="0")
    """Attempts that ended before this moment are no longer held against it."""


class Drafter(Base):
    """A finished drafter, by name."""

    __tablename__ = "drafters"
    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(String(64))
    digest: Mapped[str] = mapped_column(String(128))
    verdict: Mapped[str] = mapped_column(String(16))
    figures: Mapped[Document]
    created_at: Mapped[float]


class StoreOwner(Base):
    """The name under which this database owns its object store; one row."""

    __tablename__ = "store_owner"
    place: Mapped[str] = mapped_column(String(16), primary_key=True)
    id: Mapped[str] = mapped_column(String(64))


class Deletion(Base):
    """A deletion that somebody asked for, and its proof."""

    __tablename__ = "deletions"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), index=True)
    scope: Mapped[Document]
    prefixes: Mapped[list[str]]
    """Everything below these was to go."""
    digests: Mapped[dict[str, str]]
    """BLAKE3 of what manifests listed, by key; read before anything was deleted."""
    requested_at: Mapped[float]
    finished_at: Mapped[float | None]
    remaining: Mapped[int | None]
    """Objects that a list after the deletion still showed."""


class DeletedObject(Base):
    """An object that a deletion took away; written before it goes, so that a crash loses no line."""

    __tablename__ = "deleted_objects"
    deletion_id: Mapped[str] = mapped_column(ForeignKey("deletions.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(String(1024), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    blake3: Mapped[str | None] = mapped_column(String(64))


class Tenant(Base):
    """Somebody whose jobs, data and drafters nobody else sees, and what they may use (null = as much as there is)."""

    __tablename__ = "tenants"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[float]
    weight: Mapped[float] = mapped_column(default=1.0)
    """Share of the workers, relative to others that have work waiting."""
    max_running_jobs: Mapped[int | None]
    max_living_jobs: Mapped[int | None]
    gpu_hours: Mapped[float | None]
    """Of the last 30 days."""
    store_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """What its results may hold; null = what the operator gives everybody."""


class ApiKey(Base):
    """A key to the API. Of its secret only a hash is kept."""

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(64))
    secret_hash: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[list[str]]
    created_at: Mapped[float] = mapped_column(index=True)
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    last_used_at: Mapped[float | None]


class AuditEntry(Base):
    """Somebody changed something."""

    __tablename__ = "audit"
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    at: Mapped[float]
    tenant: Mapped[str] = mapped_column(String(64))
    key_id: Mapped[str | None] = mapped_column(String(16))
    """Null for the user of an embedded house."""
    request_id: Mapped[str] = mapped_column(String(64))
    action: Mapped[str] = mapped_column(String(32))
    target: Mapped[str] = mapped_column(String(64))
    data: Mapped[Document]

    __table_args__ = (Index("ix_audit_tenant", "tenant", "number"), {"sqlite_autoincrement": True})


class Usage(Base):
    """What a tenant's attempts took, by the day on which they ended (days since the epoch)."""

    __tablename__ = "usage"
    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    day: Mapped[int] = mapped_column(primary_key=True)
    unit_seconds: Mapped[float]
    gpu_seconds: Mapped[float]


class RateBucket(Base):
    """What is left of a key's requests; used where several API processes share the database (see `tenants.buckets`)."""

    __tablename__ = "rate_buckets"
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    tokens: Mapped[float]
    at: Mapped[float]
    allowed: Mapped[bool]
