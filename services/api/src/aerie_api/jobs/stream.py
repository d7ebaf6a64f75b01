"""A job's events as they happen (server-sent events).

Every event carries its number as the stream's id, so a reader that was cut off goes on where it stopped. A comment
every 15 s keeps proxies from closing a quiet stream. The stream ends when the job has; a reader that comes back after
that gets 204, which tells browsers to stop asking. It also ends with the key that opened it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from fastapi import Response
from fastapi.responses import StreamingResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from aerie_api.bell import Bell
from aerie_api.engines import unavailable
from aerie_api.jobs.reading import ReadingService
from aerie_api.jobs.schemas import JobEvent

QUIET_S = 15.0
AWAY_PAUSE_S = 1.0
"""Time between two looks for a database that is away."""
PAGE = 200


async def event_stream(
    reading: ReadingService, news: Bell, tenant: str, job_id: str, after: int, let_in: Callable[[], bool]
) -> Response:
    """The response that streams the events of `job_id` with a number above `after`, as long as its reader is `let_in`.

    Raises JobMissing.
    """
    first, ended = await run_in_threadpool(reading.events_and_end, tenant, job_id, after, 1)
    if ended and not first.data:
        return Response(status_code=204)
    headers = {"X-Accel-Buffering": "no"}
    return StreamingResponse(
        _events(reading, news, tenant, job_id, after, let_in), media_type="text/event-stream", headers=headers
    )


async def _events(
    reading: ReadingService, news: Bell, tenant: str, job_id: str, after: int, let_in: Callable[[], bool]
) -> AsyncIterator[str]:
    with news.listen() as waiter:
        while not news.closed:
            try:
                if not await run_in_threadpool(let_in):
                    return
                page, ended = await run_in_threadpool(reading.events_and_end, tenant, job_id, after, PAGE)
            except SQLAlchemyError as error:
                if unavailable(error) is None:
                    raise
                yield ": the database is away\n\n"
                await waiter.heard(AWAY_PAUSE_S)
                continue
            for event in page.data:
                yield _lines(event)
            after = page.last_seq
            if ended:
                return
            if not page.has_more and not await waiter.heard(QUIET_S):
                yield ": still here\n\n"


def _lines(event: JobEvent) -> str:
    """One event; its data is JSON on one line, so no text in it can end it early."""
    return f"id: {event.seq}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n"
