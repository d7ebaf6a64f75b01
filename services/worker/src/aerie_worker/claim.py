"""What a worker says to the API: claim, heartbeat, commit, failure. The only module that knows routes.

A claim shows the fleet's worker token; everything about a unit shows the token of the attempt that holds it.

Each call is safe to repeat (`aerie_worker.patience`): the attempt's token fences it, and a commit that was stored already is
answered as if it were new.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from eagle3_core.errors import AerieError
from eagle3_core.faults import placed
from eagle3_core.jobs.refusals import LeaseLost, Unreachable, WorkerSetAside
from eagle3_core.jobs.wire import (
    Assignment,
    AttemptStop,
    ClaimRequest,
    Commit,
    Failure,
    Heartbeat,
    HeartbeatAnswer,
    ObjectAnswer,
    ObjectAsk,
    Stops,
    StopsAnswer,
)
from eagle3_core.telemetry import traces

TIMEOUT_S = 10.0
OBJECTS_TIMEOUT_S = 90.0
"""A list or a deletion is asked of the store again for up to a minute."""


class Refused(AerieError):
    """The API refuses what the worker says."""

    code, status = "api.refused", 400


class Untrusted(AerieError):
    """The API does not prove that it is the API."""

    code, status = "api.untrusted", 502


def trusting(ca: Path | None) -> ssl.SSLContext:
    """What to verify the API's certificate with. Raises Untrusted."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError is one
        raise Untrusted(
            f"AERIE_API_CA: {ca} cannot be used: {error.strerror or error}",
            remedy="name a PEM file with the certificate of the authority that signed the API's",
        ) from None


def distrust(error: BaseException) -> str | None:
    """Why a connection failed if it is for the certificate's sake."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return cause.verify_message
        cause = cause.__cause__ or cause.__context__
    return None


class Control:
    """The API's internal routes, for one start of one worker."""

    def __init__(
        self, url: str, token: str, worker_id: str, incarnation: str, queues: list[str], ca: Path | None = None,
        gpus: int = 0, *, lent: bool = False,
    ) -> None:  # fmt: skip
        """`token` is the fleet's worker token; `incarnation` differs with every start, so old leases fall free; `gpus` is
        how many a unit has while this worker runs it; `lent`: it has no key to the object store.

        `ca`: PEM file of who signed the API's certificate; default: those that this machine trusts. Raises Untrusted.
        """
        self._http = httpx.Client(
            base_url=f"{url.rstrip('/')}/internal/v1",
            timeout=httpx.Timeout(TIMEOUT_S, connect=3.0),
            trust_env=False,
            verify=trusting(ca) if url.startswith("https:") else True,
        )
        self._token = token
        self._who = ClaimRequest(worker_id=worker_id, incarnation=incarnation, queues=queues, gpus=gpus, lent=lent)

    def claim(self, wait_s: float, queues: list[str] | None = None) -> Assignment | None:
        """A unit to run (of `queues`; default: all that this worker serves), or None when none came within `wait_s` seconds.

        Raises Unreachable, Refused, WorkerSetAside.
        """
        only = {} if queues is None else {"only": queues}
        request = self._who.model_copy(update={"wait_s": wait_s, **only})
        response = self._post("/claim", request.model_dump(), self._token, timeout_s=wait_s + TIMEOUT_S)
        return None if response.status_code == 204 else _read(Assignment, response)

    def heartbeat(self, assignment: Assignment, beat: Heartbeat) -> HeartbeatAnswer:
        """Extend the lease and hand on the news. Raises Unreachable, LeaseLost, Refused."""
        route = f"/units/{assignment.unit_run_id}/heartbeat"
        return _read(HeartbeatAnswer, self._post(route, beat.model_dump(mode="json"), assignment.token))

    def stops(self, known: Mapping[str, int], wait_s: float) -> dict[str, AttemptStop]:
        """What is to stop of what this worker holds, by unit, but for the attempts `known` (fences by unit); waits up to
        `wait_s` for something.

        Raises Unreachable, Refused.
        """
        question = Stops(
            worker_id=self._who.worker_id, incarnation=self._who.incarnation, known=dict(known), wait_s=wait_s
        )
        response = self._post("/stops", question.model_dump(), self._token, timeout_s=wait_s + TIMEOUT_S)
        return _read(StopsAnswer, response).units

    def commit(self, assignment: Assignment, commit: Commit) -> None:
        """Make the unit's output count. Raises Unreachable, LeaseLost, Refused."""
        self._post(f"/units/{assignment.unit_run_id}/commit", commit.model_dump(mode="json"), assignment.token)

    def fail(self, assignment: Assignment, failure: Failure) -> None:
        """End the attempt without a result. Raises Unreachable, LeaseLost, Refused."""
        self._post(f"/units/{assignment.unit_run_id}/fail", failure.model_dump(mode="json"), assignment.token)

    def objects(self, assignment: Assignment, ask: ObjectAsk) -> ObjectAnswer:
        """What the process of a unit asks of the object store. Raises Unreachable, and whatever the API answers, as its own type."""
        route = f"/units/{assignment.unit_run_id}/objects"
        return _read(ObjectAnswer, self._post(route, ask.model_dump(), assignment.token, OBJECTS_TIMEOUT_S, told=True))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _post(
        self, route: str, body: dict[str, Any], token: str, timeout_s: float = TIMEOUT_S, *, told: bool = False
    ) -> httpx.Response:
        """The API's answer. `told`: a refusal, also one by the object store behind the API, is raised as what it is."""
        headers = {"Authorization": f"Bearer {token}"}
        if (parent := traces.current()) is not None:
            headers["traceparent"] = parent
        try:
            response = self._http.post(route, json=body, headers=headers, timeout=timeout_s)
        except httpx.TransportError as error:
            if (why := distrust(error)) is not None:
                raise Untrusted(
                    f"{self._http.base_url} shows a certificate that is not trusted: {why}",
                    remedy="let AERIE_API_CA name the PEM file of the authority that signed it, and use a name it is for",
                ) from error
            raise Unreachable(f"{self._http.base_url} does not answer: {error!r}", remedy="start the API") from error
        if response.is_success:
            return response
        problem = _problem(response)
        if told and str(problem.get("code", "")).startswith(("store.", "object.", "lease.", "worker.")):
            raise AerieError.from_problem(problem)
        if response.status_code >= 500 or response.status_code == 429:
            raise Unreachable(f"{route} answers {response.status_code}", remedy="look at the API's log")
        error = AerieError.from_problem(problem)
        if error.code == LeaseLost.code:
            raise LeaseLost(error.detail, remedy=error.remedy)
        if error.code == WorkerSetAside.code:
            raise WorkerSetAside(error.detail, remedy=error.remedy)
        raise Refused(f"{route} answers {response.status_code}: {error.detail}", remedy=error.remedy)


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        document = response.json()
    except ValueError:
        document = None
    return document if isinstance(document, dict) else {"status": response.status_code, "detail": response.text[:200]}


def _read(kind: type[Any], response: httpx.Response) -> Any:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        raise Refused(
            f"the API's {kind.__name__} does not read: {placed(error.errors()[0], kind)}",
            remedy="run the API and its workers from one version",
        ) from None
