"""Jobs as they go over the wire. Names follow the fine-tuning APIs that people know.

Times are seconds since the epoch. What is not known yet is null, never a guess.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from aerie_api.drafters.schemas import AcceptanceLength, Serving
from aerie_api.problems import Problem
from eagle3_core.jobs.graph import Queue, StageName
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.jobs.states import Cause, JobStatus, UnitState


class Answer(BaseModel):
    """A document of the API."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Shards(Answer):
    """Units of a stage."""

    done: int
    total: int


class StageMetric(Answer):
    """The furthest value of one curve."""

    name: str
    step: int
    value: float | None
    """Null where the stage measured NaN or an infinity."""


class StageStatus(Answer):
    """How one stage of a job stands."""

    name: StageName
    state: UnitState
    progress_percentage: float
    estimated_remaining_seconds: float | None = None
    """From the pace so far; null until there is one, and where what is left takes no equal steps."""
    shards: Shards | None = None
    """The stage's units; null until it is planned."""
    reused: bool = False
    """Every unit was taken over from earlier jobs; nothing ran."""
    reused_units: int = 0
    reused_from: list[str] = Field(default_factory=list)
    """The jobs that ran the units taken over."""
    seconds: float | None = None
    """How long it ran, to its end or the last sign of life: what it stood still between attempts is left out."""
    attempt: int = 0
    """Highest attempt of a unit."""
    workers: list[str] = Field(default_factory=list)
    """Who works on it now."""
    started_at: float | None = None
    finished_at: float | None = None
    last_heartbeat: float | None = None
    note: str = ""
    """What the stage says it is doing."""
    rate: float | None = None
    """Units of `rate_unit` per second, over all workers."""
    rate_unit: str | None = None
    metrics: list[StageMetric] | None = None
    """Loss, rates and whatever else it measures, each at its furthest step; null in lists. `/jobs/{id}/metrics` has the curves."""
    reason: Problem | None = None
    """Why it failed."""
    result: dict[str, Any] | None = None
    """The stage's own summary."""


class DrafterRef(Answer):
    """The drafter that a job made."""

    name: str
    digest: str


class Job(Answer):
    """A job."""

    id: str
    object: Literal["job"] = "job"
    name: str
    status: JobStatus
    stage: StageName | None
    """The stage it is at."""
    stages: list[StageStatus]
    created_at: float
    started_at: float | None
    finished_at: float | None
    estimated_finish: float | None
    """When the present stage is likely to be done plus what later stages took last time; null until both are known."""
    why_queued: str | None
    """Why nothing of it runs although it could."""
    reason: Problem | None
    """Why it failed."""
    verdict: Literal["pass", "fail"] | None
    reasons: list[str] | None
    """Why the verdict is `fail`; empty for `pass`."""
    acceptance_length: AcceptanceLength | None
    """As promised: counted by drafting and verifying in this house's own decoder."""
    acceptance_length_served: AcceptanceLength | None
    """As delivered: counted by the engine that serves; null unless `verifier.backend` is `sglang`."""
    serving: Serving | None
    """What else the engine said while it served."""
    acceptance_by_position: list[float | None] | None
    lossless: bool | None
    near_tie_share: float | None
    """Share of the prompts whose drafted answer leaves the verifier's own at a near-tie; 0 in float32."""
    looping_share: float | None
    seen_ngram_share: float | None
    prompts: int | None
    predicted_speedup: dict[str, Any] | None
    """Predicted, not measured, from what passes of this verifier and drafter cost on the evaluating machine."""
    drafter: DrafterRef | None
    warnings: list[str]
    metadata: dict[str, str]
    spec: JobSpec


class JobList(Answer):
    """A page of jobs, newest first."""

    object: Literal["list"] = "list"
    data: list[Job]
    has_more: bool
    first_id: str | None
    last_id: str | None
    """Ask for the next page with `after=` this."""


class PlannedStage(Answer):
    """A stage that a job would run."""

    name: StageName
    queue: Queue
    reads: list[StageName]
    units: int | None
    """Null when it depends on what an earlier stage finds."""
    reused_units: int | None
    """Units whose results are there already; null when their keys depend on what an earlier stage finds."""


class JobPlan(Answer):
    """What a job would do, had it been posted."""

    object: Literal["job.plan"] = "job.plan"
    name: str
    stages: list[PlannedStage]
    sources: dict[str, str]
    """Digests of the verifier and the data, as they lie there now."""
    train_peak_bytes: int
    """Most memory that training takes, of each GPU where it trains on GPUs: with full passes, all the assistant's."""
    warnings: list[str]
    """What is odd about the job, and which of its stages no worker could run as the fleet is now."""
    spec: JobSpec
    """The job with every default filled in."""


class JobEvent(Answer):
    """Something that happened to a job."""

    object: Literal["job.event"] = "job.event"
    seq: int
    created_at: float
    type: str
    level: Literal["info", "warning", "error"]
    message: str
    data: dict[str, Any]


class EventList(Answer):
    """Events in order."""

    object: Literal["list"] = "list"
    data: list[JobEvent]
    has_more: bool
    last_seq: int
    """Ask for what comes next with `after=` this."""


class LogEntry(Answer):
    """A line that a stage said."""

    seq: int
    stage: StageName
    unit: int
    attempt: int
    at: float
    level: Literal["debug", "info", "warning", "error"]
    text: str


class LogList(Answer):
    """Lines in order."""

    object: Literal["list"] = "list"
    data: list[LogEntry]
    has_more: bool
    last_seq: int


class MetricPoint(Answer):
    """One value of one curve."""

    stage: StageName
    name: str
    step: int
    unit: int
    value: float | None
    """Null where the stage measured NaN or an infinity."""
    at: float


class MetricList(Answer):
    """Values by stage, name and step."""

    object: Literal["list"] = "list"
    data: list[MetricPoint]
    has_more: bool


class AttemptEntry(Answer):
    """One attempt at one unit."""

    stage: StageName
    unit: int
    attempt: int
    fence: int
    worker: str
    started_at: float
    ended_at: float | None
    outcome: Literal["committed"] | Cause | None
    """Null while it runs."""
    problem: Problem | None


class AttemptList(Answer):
    """Attempts in order of their start."""

    object: Literal["list"] = "list"
    data: list[AttemptEntry]
    has_more: bool = False


class Checkpoint(Answer):
    """A point from which another attempt at the training would go on."""

    object: Literal["job.checkpoint"] = "job.checkpoint"
    step_number: int
    """Optimizer steps done."""
    fence: int
    """Of the attempt that saved it."""
    created_at: float
    size: int
    """Bytes of weights and optimizer states."""
    metrics: dict[str, float | None]
    """What the training's curves say at this step."""


class CheckpointList(Answer):
    """Whole checkpoints, newest first; none before the first is saved, and none once package is done."""

    object: Literal["list"] = "list"
    data: list[Checkpoint]
    has_more: bool = False


class Artifact(Answer):
    """A file of the finished drafter."""

    name: str
    size: int
    blake3: str
    href: str
    """Path under which the API itself serves it."""
    url: str | None = None
    """The store's own short-lived URL, where it has such; whoever knows it may download."""


class ArtifactList(Answer):
    """The files of the finished drafter; empty until there is one."""

    object: Literal["list"] = "list"
    data: list[Artifact]
    has_more: bool = False
