"""HTTP of jobs: parse, call, answer."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import FiniteFloat
from starlette.concurrency import run_in_threadpool

from aerie_api.auth import Reader, Writer
from aerie_api.engines import LARGEST_NUMBER
from aerie_api.house import House, house_of
from aerie_api.jobs.repository import Wanted
from aerie_api.jobs.schemas import (
    ArtifactList,
    AttemptList,
    CheckpointList,
    EventList,
    Job,
    JobList,
    JobPlan,
    LogList,
    MetricList,
)
from aerie_api.jobs.stream import event_stream
from aerie_api.jobs.tags import matches
from eagle3_core import strict_json
from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import StageName
from eagle3_core.jobs.states import JobStatus

router = APIRouter(tags=["jobs"])
Inside = Annotated[House, Depends(house_of)]
After = Annotated[int, Query(ge=0, le=LARGEST_NUMBER)]
IfMatch = Annotated[str | None, Header()]
"""The tag that the job must still have, else 412."""
JOB_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/JobSpec"}}},
    }
}
RETRY_AFTER_S = 2


class NotReadable(AerieError):
    """The body is not JSON, or names a field twice."""

    code, status = "request.json", 400


async def posted(request: Request) -> tuple[Any, bytes]:
    """The body, decoded, and as it came. NaN stays NaN, so that the job model can name the field it stands in; of a field
    that stands twice nobody knows which is meant."""
    body = await request.body()
    try:
        return strict_json.loads_once(body), body
    except strict_json.Twice as error:
        raise NotReadable(f"the body is ambiguous: {error}", remedy="send it once", pointer=error.pointer) from None
    except (ValueError, RecursionError) as error:
        raise NotReadable(f"the body is not JSON: {str(error)[:200]}", remedy="send one JSON object") from None


Posted = Annotated[tuple[Any, bytes], Depends(posted)]


@router.post("/jobs", status_code=202, operation_id="create_job", response_model=Job, openapi_extra=JOB_BODY)
def create_job(
    request: Request,
    caller: Writer,
    inside: Inside,
    body: Posted,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> Response:
    """Post a job. It is checked against verifier and data first; what is wrong with it is said here, not hours later."""
    job, replayed = inside.jobs.of(caller).create(body[0], body[1], idempotency_key)
    headers = {"Location": f"{request.url.path.rstrip('/')}/{job.id}", "Retry-After": str(RETRY_AFTER_S)}
    if replayed:
        headers["Idempotency-Replayed"] = "true"
    return JSONResponse(job.model_dump(mode="json"), 202, headers)


@router.post("/jobs:plan", operation_id="plan_job", openapi_extra=JOB_BODY)
def plan_job(caller: Reader, inside: Inside, body: Posted) -> JobPlan:
    """Say what a job would do, and what of it is known already. Nothing is stored."""
    return inside.jobs.of(caller).plan(body[0])


@router.get("/jobs", operation_id="list_jobs")
def list_jobs(
    caller: Reader,
    inside: Inside,
    status: Annotated[list[JobStatus] | None, Query()] = None,
    name: Annotated[str | None, Query(max_length=64)] = None,
    stage: StageName | None = None,
    created_after: FiniteFloat | None = None,
    created_before: FiniteFloat | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> JobList:
    """Jobs, newest first; those that match every filter that is given."""
    wanted = Wanted(status or [], name, stage, created_after, created_before)
    return inside.jobs.of(caller).list(wanted, after, limit)


@router.get("/jobs/{job_id}", operation_id="get_job", response_model=Job, responses={304: {"description": "Unchanged"}})
def get_job(
    job_id: str, caller: Reader, inside: Inside, if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """One job. Its ETag changes with it: ask with If-None-Match to get 304 while nothing happened."""
    shown = inside.jobs.of(caller).get(job_id)
    headers = {"ETag": shown.tag, "Cache-Control": "no-cache"}
    if not shown.ended:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if if_none_match is not None and matches(if_none_match, shown.tag):
        return Response(status_code=304, headers=headers)
    return Response(shown.body, headers=headers, media_type="application/json")


@router.delete("/jobs/{job_id}", status_code=204, operation_id="delete_job", response_class=Response)
def delete_job(job_id: str, caller: Writer, inside: Inside, if_match: IfMatch = None) -> None:
    """Remove a job that has ended, with its events, logs, curves and drafter. Results that other jobs reuse stay."""
    inside.jobs.of(caller, if_match).delete(job_id)


@router.post("/jobs/{job_id}/cancel", status_code=202, operation_id="cancel_job")
def cancel_job(job_id: str, caller: Writer, inside: Inside, if_match: IfMatch = None) -> Job:
    """Stop a living job. It is `cancelling` until the last of its units has stopped."""
    return inside.jobs.of(caller, if_match).cancel(job_id)


@router.post("/jobs/{job_id}/pause", status_code=202, operation_id="pause_job")
def pause_job(job_id: str, caller: Writer, inside: Inside, if_match: IfMatch = None) -> Job:
    """Let a living job wait. Its running units save and give their place back; nothing is lost."""
    return inside.jobs.of(caller, if_match).pause(job_id)


@router.post("/jobs/{job_id}/resume", status_code=202, operation_id="resume_job")
def resume_job(job_id: str, caller: Writer, inside: Inside, if_match: IfMatch = None) -> Job:
    """Let a paused job go on from where it stood."""
    return inside.jobs.of(caller, if_match).resume(job_id)


@router.post("/jobs/{job_id}/retry", status_code=202, operation_id="retry_job")
def retry_job(job_id: str, caller: Writer, inside: Inside, if_match: IfMatch = None) -> Job:
    """Take a failed or cancelled job up again where it stopped; what it has is kept."""
    return inside.jobs.of(caller, if_match).retry(job_id)


@router.get(
    "/jobs/{job_id}/events",
    operation_id="list_events",
    response_model=EventList,
    responses={
        200: {"content": {"text/event-stream": {}}},
        204: {"description": "The job has ended; nothing will come"},
    },
)
async def list_events(
    job_id: str,
    request: Request,
    caller: Reader,
    inside: Inside,
    after: After = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """What happened to a job: a list, or with `Accept: text/event-stream` as it happens."""
    if "text/event-stream" in request.headers.get("accept", ""):
        seen = int(last_event_id) if last_event_id and re.fullmatch(r"[0-9]{1,15}", last_event_id) else after
        seen = min(seen, LARGEST_NUMBER)
        let_in = partial(inside.gate.still, caller)
        return await event_stream(inside.reading, inside.news, caller.tenant, job_id, seen, let_in)
    page = await run_in_threadpool(inside.reading.events, caller.tenant, job_id, after, limit)
    return JSONResponse(page.model_dump(mode="json"))


@router.get("/jobs/{job_id}/logs", operation_id="list_logs")
def list_logs(
    job_id: str,
    caller: Reader,
    inside: Inside,
    stage: StageName | None = None,
    unit: Annotated[int | None, Query(ge=0, le=LARGEST_NUMBER)] = None,
    after: After = 0,
    tail: Annotated[int | None, Query(ge=1, le=10000)] = None,
    limit: Annotated[int, Query(ge=1, le=10000)] = 1000,
) -> LogList:
    """What the stages said: the lines after a number, or the last `tail` ones."""
    return inside.reading.logs(caller.tenant, job_id, stage=stage, unit=unit, after=after, tail=tail, limit=limit)


@router.get("/jobs/{job_id}/metrics", operation_id="list_metrics")
def list_metrics(
    job_id: str,
    caller: Reader,
    inside: Inside,
    name: Annotated[list[str] | None, Query()] = None,
    stage: StageName | None = None,
    since_step: Annotated[int, Query(ge=-1, le=1 << 53)] = -1,
    limit: Annotated[int, Query(ge=1, le=100000)] = 20000,
) -> MetricList:
    """Curves: loss, learning rate and whatever else the stages measured."""
    return inside.reading.metrics(caller.tenant, job_id, name or [], stage, since_step, limit)


@router.get("/jobs/{job_id}/attempts", operation_id="list_attempts")
def list_attempts(job_id: str, caller: Reader, inside: Inside) -> AttemptList:
    """Who tried which unit, and how each attempt ended."""
    return inside.reading.attempts(caller.tenant, job_id)


@router.get("/jobs/{job_id}/checkpoints", operation_id="list_checkpoints")
def list_checkpoints(job_id: str, caller: Reader, inside: Inside) -> CheckpointList:
    """From where another attempt at the training would go on."""
    return inside.checkpoints.list(caller.tenant, job_id)


@router.get("/jobs/{job_id}/artifacts", operation_id="list_artifacts")
def list_artifacts(job_id: str, request: Request, caller: Reader, inside: Inside) -> ArtifactList:
    """The files of the finished drafter."""
    return inside.artifacts.list(caller.tenant, job_id, request.url.path.rstrip("/"))


@router.get(
    "/jobs/{job_id}/artifacts/{name:path}",
    operation_id="get_artifact",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The file"}},
)
def get_artifact(
    job_id: str, name: str, caller: Reader, inside: Inside, if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """One file of the finished drafter; `X-Content-BLAKE3` is its digest."""
    entry, pieces = inside.artifacts.open(caller.tenant, job_id, name)
    headers = {"ETag": f'"{entry.blake3}"', "X-Content-BLAKE3": entry.blake3, "Cache-Control": "private, immutable"}
    if if_none_match is not None and matches(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    headers["Content-Length"] = str(entry.size)
    headers["Content-Disposition"] = f"attachment; filename*=UTF-8''{quote(name.rpartition('/')[2], safe='')}"
    return StreamingResponse(pieces, headers=headers, media_type="application/octet-stream")
