"""What travels between the API, its workers and their child processes: one set of models for all three.

A worker claims a unit (`Assignment`), reports (`Heartbeat` -> `HeartbeatAnswer`), and ends it with a `Commit` or a
`Failure`. The child speaks the same models as JSON lines over its pipes: one `Assignment` in, many `ChildMessage` out.
Every write names the attempt's token, so a worker that lost its lease changes nothing.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from eagle3_core import patterns
from eagle3_core.jobs.graph import StageName
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.jobs.states import Cause
from eagle3_core.text import sayable

MAX_NOTE = 500

Said = Annotated[str, AfterValidator(sayable)]
"""Text that a person reads."""
Note = Annotated[str, AfterValidator(lambda text: sayable(text)[:MAX_NOTE])]
"""A short such text; a longer one is cut."""


Amount = Annotated[float, AfterValidator(lambda number: number if isfinite(number) else 0.0)]
"""A number that JSON can hold."""
Rate = Annotated[float | None, AfterValidator(lambda rate: rate if rate and isfinite(rate) else None)]
"""So many a second; None where nothing can be said."""


class Message(BaseModel):
    """A closed message: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class ManifestRef(Message):
    """Where a unit's committed manifest lies, and what it must hash to."""

    key: str
    """Key of the manifest in the object store."""
    blake3: str
    """Digest of the manifest file itself."""
    content: str
    """Digest of what the manifest lists (files and summary, not places or times): what downstream keys are made of."""


class UnitSlice(Message):
    """Which unit of its stage this is, and which items it covers."""

    index: int
    start: int
    stop: int
    of: int
    """Number of units of the stage."""


class Assignment(Message):
    """One attempt at one unit, as a worker gets it."""

    unit_run_id: str
    job_id: str
    tenant: str
    stage: StageName
    unit: UnitSlice
    attempt: int
    fence: int
    """Grows with every claim of the unit; part of every key that the attempt writes."""
    token: str
    """Secret of this attempt; authorises its heartbeats and its commit. Never passed to the child's arguments or logs."""
    key: str
    """The unit's cache key."""
    spec: JobSpec
    sources: dict[str, str]
    """Digests of verifier and datasets, as keys were made from."""
    inputs: dict[StageName, list[ManifestRef]]
    """Manifests of what this unit reads, in unit order (all units of each stage in `reads_of`, in order)."""
    results: dict[StageName, dict[str, Any]]
    """Reduced results of the finished stages."""
    lease_s: float
    traceparent: str | None = None
    """The span (W3C trace context) that what runs this belongs under; None where nothing is traced."""


UNEVEN = "parts"
"""What a progress counts that consists of parts of unlike length: it says how far a unit is, and nothing of its pace."""


class Progress(Message):
    """How far a unit is. What is not a number counts as nothing."""

    done: Amount
    total: Amount
    unit: Note = "steps"
    """What is counted: samples, tokens, steps, prompts, or `UNEVEN` parts."""
    rate_per_s: Rate = None
    tokens_per_s: Rate = None
    """The pace in tokens, whatever is counted; what a note says of it is for people."""
    note: Note = ""


class Metric(Message):
    """One value of one curve."""

    name: Note
    value: float
    step: int


class LogLine(Message):
    """One line of a unit's log."""

    at: float
    """Seconds since the epoch."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    text: Said


class Heartbeat(Message):
    """A worker's sign of life for one unit; carries what happened since the last one."""

    progress: Progress | None = None
    metrics: list[Metric] = Field(default_factory=list[Metric])
    logs: list[LogLine] = Field(default_factory=list[LogLine])


class HeartbeatAnswer(Message):
    """What the API wants: go on, or stop."""

    cancel: bool = False
    """Stop; what the unit makes is no longer wanted."""
    give_back: bool = False
    """Stop and save; the unit goes on when its job is resumed."""
    lease_s: float


class Stops(Message):
    """A worker asks what is to stop of what it holds, and waits up to `wait_s` for something."""

    worker_id: str
    incarnation: str
    known: dict[str, int] = Field(default_factory=dict[str, int], max_length=64)
    """Fence of the latest attempt of whose stop it knows, by unit."""
    wait_s: float = Field(default=20.0, ge=0, le=60)


class AttemptStop(HeartbeatAnswer):
    """What the API wants of one attempt, and of no other at the same unit."""

    fence: int


class StopsAnswer(Message):
    """What is to stop, by unit; empty when nothing is."""

    units: dict[str, AttemptStop]


class Output(Message):
    """A finished result: the unit's own, or one that came with it for another stage."""

    stage: StageName
    key: str
    manifest: ManifestRef
    result: Annotated[dict[str, Any], AfterValidator(sayable)]
    """Small JSON summary that the API keeps, reduces over units and shows."""


class Commit(Message):
    """The end of a successful attempt."""

    output: Output
    also: list[Output] = Field(default_factory=list[Output])
    """Results of other stages' units that this unit produced on its way (states kept while generating)."""
    seconds: float
    logs: list[LogLine] = Field(default_factory=list[LogLine])
    metrics: list[Metric] = Field(default_factory=list[Metric])


class Failure(Message):
    """The end of an attempt without a result."""

    cause: Cause
    problem: Annotated[dict[str, Any], AfterValidator(sayable)]
    """Problem document of the error (see `AerieError.problem`)."""
    retryable: bool = True
    logs: list[LogLine] = Field(default_factory=list[LogLine])


class ObjectAsk(Message):
    """The process of a unit asks for one thing of an object store that it has no key to."""

    do: Literal["get", "put", "begin", "part", "end", "abort", "list", "delete"]
    """`begin`, `part`, `end` and `abort` are those of an upload in parts."""
    key: Annotated[str, Field(min_length=1, max_length=1024)]
    """The object's; of `list` what the keys begin with."""
    blake3: Annotated[str, Field(pattern=patterns.BLAKE3)] | None = None
    """Of `put`: the digest that the store keeps with the object."""
    upload_id: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    part: Annotated[int, Field(ge=1, le=10_000)] | None = None
    after: Annotated[str, Field(max_length=1024)] = ""
    """Of `list`: the last key of the answer before."""


class Stored(Message):
    """An object that is there."""

    key: str
    size: int
    modified: float


class ObjectAnswer(Message):
    """A request that the process may send to the store itself, or what the store was asked on its behalf."""

    url: str | None = None
    """Carries its own signature: whoever has it may send this one request, so it goes into no log."""
    headers: dict[str, str] = Field(default_factory=dict[str, str])
    """What the request must carry, as it is."""
    lasts_s: float = 0.0
    found: list[Stored] = Field(default_factory=list[Stored])
    more: bool = False


class ClaimRequest(Message):
    """A worker asks for work and waits up to `wait_s` for it."""

    worker_id: str
    incarnation: str
    """Changes with every start of the worker: leases of an earlier incarnation are free at once."""
    queues: list[str]
    """What the worker serves."""
    only: list[str] | None = None
    """What it asks for now, of `queues`; null = all."""
    gpus: int = Field(default=0, ge=0, le=1024)
    """GPUs that a unit has to itself while this worker runs it; they count against the tenant's GPU-hours."""
    lent: bool = False
    """Whether its units' objects must be lent to it: it has no key to the object store."""
    wait_s: float = Field(default=20.0, ge=0, le=60)


class ChildMessage(Message):
    """One line from the child: exactly one field is set."""

    ready: bool | None = None
    progress: Progress | None = None
    metric: Metric | None = None
    log: LogLine | None = None
    commit: Commit | None = None
    failure: Failure | None = None
