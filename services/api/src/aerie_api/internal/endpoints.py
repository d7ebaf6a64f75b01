"""HTTP of workers: claim, heartbeat, commit, fail, and the object store for those that have no key to it.

Asking for work takes the worker token; everything about a unit takes the token of the attempt that holds it.
"""

from __future__ import annotations

import hmac
import time
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from aerie_api.bell import Line
from aerie_api.engines import unavailable
from aerie_api.house import House, house_of
from aerie_api.internal.schemas import Claim, Done, StopsQuestion
from aerie_api.leases.claims import Claims, UnknownToken
from eagle3_core.jobs.wire import (
    Assignment,
    Commit,
    Failure,
    Heartbeat,
    HeartbeatAnswer,
    ObjectAnswer,
    ObjectAsk,
    StopsAnswer,
)

AWAY_PAUSE_S = 0.5
"""Time between two looks for a database that is away."""
router = APIRouter(prefix="/internal/v1", tags=["workers"])
Inside = Annotated[House, Depends(house_of)]


_DESCRIBED = HTTPBearer(
    scheme_name="token", auto_error=False, description="The fleet's worker token; about a unit, that of its attempt."
)
"""For the OpenAPI document only."""


async def bearer(
    _described: Annotated[HTTPAuthorizationCredentials | None, Security(_DESCRIBED)],
    authorization: Annotated[str, Header(include_in_schema=False)] = "",
) -> str:
    """The request's bearer token. Raises UnknownToken."""
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise UnknownToken("the request carries no bearer token", remedy="send Authorization: Bearer TOKEN")
    return token


Token = Annotated[str, Depends(bearer)]


def check_worker(token: str, inside: House) -> None:
    """Raise UnknownToken unless `token` is the fleet's."""
    if not hmac.compare_digest(token.encode(), inside.worker_token.encode()):
        raise UnknownToken(
            "the token is not the worker token", remedy="read it from the file that AERIE_WORKER_TOKEN_FILE names"
        )


@router.post(
    "/claim",
    operation_id="claim_unit",
    response_model=Assignment,
    responses={204: {"description": "Nothing to do; ask again"}},
)
async def claim(request: Request, claim: Claim, token: Token, inside: Inside) -> Response:
    """Ask for a unit; wait for one up to `wait_s`."""
    check_worker(token, inside)
    if claim.lent:
        inside.lending.lender()
    assignment = await wait_for_work(request, claim, inside.claims, inside.work)
    if assignment is None:
        return Response(status_code=204)
    return Response(assignment.model_dump_json(), media_type="application/json")


async def wait_for_work(request: Request, claim: Claim, claims: Claims, work: Line) -> Assignment | None:
    """The next unit for a worker that stays on the line, or None after `wait_s`."""
    deadline, queues = time.monotonic() + claim.wait_s, claim.only or claim.queues
    with work.stand(frozenset(queues)) as waiter:
        while not await request.is_disconnected():
            left = pause = deadline - time.monotonic()
            try:
                if (assignment := await run_in_threadpool(claims.claim, claim)) is not None:
                    return assignment
                waiter.in_vain()
                if (due := await run_in_threadpool(claims.next_due, queues)) is not None:
                    work.ring_in(max(due, 0.01))
            except SQLAlchemyError as error:  # the database is away: who waits anyway waits for it too
                if unavailable(error) is None or left <= AWAY_PAUSE_S:
                    raise
                pause = AWAY_PAUSE_S
            if left <= 0 or work.closed:
                return None
            await waiter.heard(pause)
    return None


@router.post("/stops", operation_id="hear_stops")
async def stops(request: Request, question: StopsQuestion, token: Token, inside: Inside) -> StopsAnswer:
    """What is to stop of what a worker holds; stays on the line up to `wait_s`, so that a stop is heard at once."""
    check_worker(token, inside)
    deadline = time.monotonic() + question.wait_s
    with inside.stops.listen() as waiter:
        while True:
            units = await run_in_threadpool(inside.claims.stops, question)
            left = deadline - time.monotonic()
            if units or left <= 0 or inside.stops.closed or await request.is_disconnected():
                return StopsAnswer(units=units)
            await waiter.heard(left)


@router.post("/units/{unit_run_id}/heartbeat", operation_id="heartbeat_unit")
def heartbeat(unit_run_id: str, heartbeat: Heartbeat, token: Token, inside: Inside) -> HeartbeatAnswer:
    """Keep a unit and say how far it is; the answer says whether to stop."""
    return inside.claims.heartbeat(unit_run_id, token, heartbeat)


@router.post("/units/{unit_run_id}/objects", operation_id="lend_object")
def lend(unit_run_id: str, ask: ObjectAsk, token: Token, inside: Inside) -> ObjectAnswer:
    """One request to the object store, signed for the process of a unit that has no key to it."""
    return inside.lending.ask(unit_run_id, token, ask)


@router.post("/units/{unit_run_id}/commit", operation_id="commit_unit")
def commit(unit_run_id: str, commit: Commit, token: Token, inside: Inside) -> Done:
    """End a unit with its result. Saying it twice is fine."""
    inside.claims.commit(unit_run_id, token, commit)
    return Done()


@router.post("/units/{unit_run_id}/fail", operation_id="fail_unit")
def fail(unit_run_id: str, failure: Failure, token: Token, inside: Inside) -> Done:
    """End an attempt without a result."""
    inside.claims.fail(unit_run_id, token, failure)
    return Done()
