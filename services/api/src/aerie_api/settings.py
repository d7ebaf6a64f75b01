"""What the operator decides, read once from the environment (`AERIE_*`).

Every value has a default that is safe on one machine: the loopback address, a free port, folders under `.aerie`.
What other machines could reach asks for API keys, and must be encrypted: the API has a certificate, or the operator says
that a proxy in front of it does that. Only the embedded house, on the loopback address, lets its user in without a key.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from eagle3_core.addresses import PlainHttpRefused, is_loopback
from eagle3_core.errors import AerieError
from eagle3_core.faults import sentence
from eagle3_core.jobs import rings


class InvalidSettings(AerieError):
    """An environment variable does not validate."""

    code, status = "settings.invalid", 422


class RemoteBindRefused(AerieError):
    """The address would let other machines in without API keys."""

    code, status = "settings.remote_bind", 422


class TlsIncomplete(AerieError):
    """A certificate without its key, or a key without its certificate, or one that cannot be used."""

    code, status = "settings.tls", 500


class Settings(BaseSettings):
    """The API's settings; field `lease_s` is read from `AERIE_LEASE_S`, and so on."""

    model_config = SettingsConfigDict(
        env_prefix="AERIE_", frozen=True, extra="ignore", use_attribute_docstrings=True, env_ignore_empty=True
    )

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 takes a free one and writes it to `run_dir/server.json`."""

    keys_required: bool | None = None
    """Turn away requests without an API key. null = yes, but for the embedded house: loopback, no proxy, SQLite."""

    admin_key_file: Path | None = None
    """File of the first admin key. What it holds becomes an admin key; if it is absent and there is no admin key yet,
    one is made and written there. Default `run_dir/admin.key`."""

    rate_per_minute: Annotated[float, Field(ge=0)] = 1200.0
    """Requests that one API key may make in a minute, for long; 0 = as many as it likes."""

    rate_burst: Annotated[int, Field(ge=1)] = 200
    """Requests that one API key may make at once."""

    tls_cert: Path | None = None
    """PEM file of the server's certificate and its chain; with `tls_key` the API speaks https."""

    tls_key: Path | None = None
    """PEM file of the certificate's key, without a passphrase."""

    allow_plain_http: bool = False
    """Speak plain http on an address that other machines can reach, because something in front (or a mesh) encrypts."""

    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """More names (separated by `,`) that the Host header may carry, for instance of a proxy."""

    metrics_port: Annotated[int, Field(ge=0, le=65535)] | Literal["off"] = 0
    """Port of the metrics for Prometheus, at `/metrics`; 0 takes a free one and writes it to `run_dir/server.json`."""

    metrics_host: str = "127.0.0.1"
    """Address of the metrics. They ask for no key: another one must be reachable by Prometheus only."""

    run_dir: Path = Path(".aerie/run")
    """Folder of what describes the running process: `server.json`, the worker token."""

    data_dir: Path = Path(".aerie/data")
    """Folder of the SQLite database, which is used when `database_url` names no other. Only one API process may open it."""

    database_url: SecretStr = SecretStr("")
    """URL of a Postgres database, `postgresql://USER@HOST:PORT/NAME`: the truth for any number of API processes. It must
    lead to Postgres itself, or through a pooler that keeps sessions: processes wake each other by LISTEN. `sqlite:///PATH`
    names another file. Empty = `aerie.db` in `data_dir`."""

    database_password_file: Path | None = None
    """File whose content is the password for `database_url`, so that no environment holds it."""

    database_connections: Annotated[int, Field(ge=2, le=1000)] = 20
    """Connections to Postgres that one process opens at most, besides one that listens."""

    store: str = ""
    """URL of the object store; empty = `objects` beside `data_dir`."""

    file_roots: Annotated[tuple[Path, ...], NoDecode] = ()
    """Folders (separated by `:`) under which `file:` URIs of jobs may lie; empty = the working folder (`aerie up` then
    names three: the working folder, its `--dir` and the cache folder). `{tenant}` in a path stands for the name of the job's
    tenant, so that none reads another one's files. Workers are told the same."""

    worker_token_file: Path | None = None
    """File whose content lets a worker ask for work; made if missing. Default `run_dir/worker.token`."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = 1 << 20
    """Largest body of a public request; more is refused with 413."""

    max_worker_body_bytes: Annotated[int, Field(ge=1024)] = 16 << 20
    """Largest body of a worker's request: its commit carries results and the last log lines."""

    preflight_cpu_s: Annotated[float, Field(gt=0)] = 30.0
    """CPU time that a look at a posted job's verifier and data may take, in a process of its own; more is refused."""

    preflight_memory_bytes: Annotated[int, Field(ge=64 << 20)] = 4 << 30
    """Memory that such a look may take."""

    lease_s: Annotated[float, Field(gt=0)] = 60.0
    """How long a unit stays with a worker that says nothing."""

    reaper_interval_s: Annotated[float, Field(gt=0)] = 1.0
    """Time between two looks for expired leases."""

    stuck_factor: Annotated[float, Field(ge=0)] = 1.0
    """Scales how long a unit may stand still before its attempt is ended (30 to 60 minutes by stage); 0 = for ever."""

    broker_url: SecretStr = SecretStr("")
    """Redis (`redis://` or `rediss://`) over which Celery workers hear of work; empty = workers ask the API."""

    broker_url_file: Path | None = None
    """File that holds the broker's URL, in place of `broker_url`."""

    broker_prefix: str = rings.PREFIX
    """Prefix of every key on the broker; workers need the same."""

    ring_again_s: Annotated[float, Field(gt=0)] = 10.0
    """After so long without a claim, a unit whose ring is gone from the broker is rung for again."""

    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Attempts of a unit that ended in an error before its job fails."""

    max_losses: Annotated[int, Field(ge=1)] = 20
    """Attempts of a unit whose worker vanished before its job fails. More than `max_attempts`: machines come and go,
    yet a unit that kills every worker it meets must end."""

    retry_base_s: Annotated[float, Field(ge=0)] = 1.0
    """Pause before the second attempt; doubles with every further one."""

    retry_max_s: Annotated[float, Field(ge=0)] = 60.0
    """Longest pause between attempts."""

    idempotency_s: Annotated[float, Field(gt=0)] = 24 * 3600.0
    """How long an Idempotency-Key is remembered."""

    collect_interval_s: Annotated[float, Field(gt=0)] = 600.0
    """Time between two rounds of the store's housekeeping."""

    collect_grace_s: Annotated[float, Field(ge=0)] = 24 * 3600.0
    """Least age of an object that no result lists before it is deleted: the time in which a mistake can be undone."""

    checkpoint_grace_s: Annotated[float, Field(ge=0)] = 7 * 24 * 3600.0
    """The same for checkpoints of trainings that ended: a retry goes on from them."""

    retain_states_s: Annotated[float, Field(ge=0)] = 0.0
    """How long hidden states are kept after their last use; 0 keeps them until room is short. They can be made again."""

    tenant_store_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes that the results of a tenant may hold that has no limit of its own; over it the least used states go first. 0 is no
    limit."""

    room_interval_s: Annotated[float, Field(gt=0)] = 10.0
    """Time between two looks for tenants over their budget and for room for jobs that wait for it."""

    room_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """What must be free in a store that was full before jobs go on, where the store says what is free."""

    presign_s: Annotated[int, Field(ge=0, le=3600)] = 300
    """How long download URLs of the store's own are valid; 0 hands none out."""

    lend_s: Annotated[int, Field(ge=0, le=86_400)] = 900
    """How long a request to the store is valid that was signed for the process of a unit whose worker has no key to the store; 0
    signs none. Longer than one part of an upload takes (32 MiB)."""

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _by_comma(cls, value: object) -> object:
        return tuple(p.strip().lower() for p in value.split(",") if p.strip()) if isinstance(value, str) else value

    @field_validator("file_roots", mode="before")
    @classmethod
    def _by_colon(cls, value: object) -> object:
        return tuple(Path(p) for p in value.split(os.pathsep) if p) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        _ = self.database
        return self

    @property
    def database(self) -> Path | URL:
        """Where the database is: a SQLite file, or a Postgres server with the password filled in."""
        given = self.database_url.get_secret_value()
        if not given:
            return self.data_dir / "aerie.db"
        try:
            url = make_url(given)
        except (ArgumentError, ValueError):
            raise ValueError("is no URL; postgresql://USER@HOST:PORT/NAME is one") from None
        if url.drivername == "sqlite" and url.database:
            return Path(url.database)
        if url.drivername not in ("postgresql", "postgresql+psycopg") or not url.database:
            raise ValueError(
                f"has scheme {url.drivername!r} and database {url.database!r}; use postgresql://USER@HOST/NAME"
            )
        if self.database_password_file is not None:
            try:
                url = url.set(password=self.database_password_file.read_text().strip())
            except OSError as error:
                raise ValueError(f"the password file {self.database_password_file}: {error.strerror}") from None
        return url.set(drivername="postgresql+psycopg")

    @property
    def roots(self) -> tuple[Path, ...]:
        """The folders of `file:` URIs, absolute."""
        return tuple(root.resolve() for root in self.file_roots) or (Path.cwd(),)

    @property
    def store_url(self) -> str:
        """The object store's URL."""
        return self.store or (self.data_dir.absolute().parent / "objects").as_uri()

    @property
    def token_file(self) -> Path:
        """Where the worker token lies."""
        return self.worker_token_file or self.run_dir / "worker.token"

    @property
    def broker(self) -> str:
        """The broker's URL, with its password; empty for none. Raises InvalidSettings."""
        if self.broker_url_file is None:
            return self.broker_url.get_secret_value()
        try:
            return self.broker_url_file.read_text().strip()
        except OSError as error:
            raise InvalidSettings(
                f"AERIE_BROKER_URL_FILE: {self.broker_url_file} cannot be read: {error.strerror}",
                remedy="name a file that holds the broker's URL",
            ) from None

    @property
    def first_key_file(self) -> Path:
        """Where the first admin key lies."""
        return self.admin_key_file or self.run_dir / "admin.key"

    @property
    def asks_for_keys(self) -> bool:
        """Whether a request without an API key is turned away."""
        embedded = (
            self.loopback and not self.allowed_hosts and not self.allow_plain_http and isinstance(self.database, Path)
        )
        return not embedded if self.keys_required is None else self.keys_required

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the API."""
        return is_loopback(self.host)


def read_settings() -> Settings:
    """The settings of this process. Raises InvalidSettings, RemoteBindRefused, TlsIncomplete, PlainHttpRefused."""
    try:
        settings = Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = "AERIE_" + "_".join(map(str, first["loc"] or ("database_url",))).upper()
        raise InvalidSettings(f"{name}: {sentence(first)}", remedy=f"correct or unset {name}") from None
    if not settings.loopback and not settings.asks_for_keys:
        raise RemoteBindRefused(
            f"AERIE_HOST={settings.host} can be reached from other machines, which would need no API key",
            remedy="listen on 127.0.0.1, or unset AERIE_KEYS_REQUIRED",
        )
    if (settings.tls_cert is None) != (settings.tls_key is None):
        missing = "AERIE_TLS_KEY" if settings.tls_key is None else "AERIE_TLS_CERT"
        raise TlsIncomplete(f"{missing} is not set", remedy="set both AERIE_TLS_CERT and AERIE_TLS_KEY, or neither")
    if not settings.loopback and settings.tls_cert is None and not settings.allow_plain_http:
        raise PlainHttpRefused(
            f"AERIE_HOST={settings.host} without a certificate would send tokens over the network in clear text",
            remedy="set AERIE_TLS_CERT and AERIE_TLS_KEY, or AERIE_ALLOW_PLAIN_HTTP=1 where something else encrypts",
        )
    return settings
