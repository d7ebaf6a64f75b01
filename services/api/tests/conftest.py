"""A whole API on a temporary folder, with a clock that tests move, and a worker that speaks the real routes.

The worker computes nothing: it writes real manifests with tiny files, so everything that the API checks is there.
Whatever uses `database` (and so `make_api`, and so `api`) runs twice: on SQLite and on Postgres.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tenant_filter  # noqa: F401 - it watches every query of every test
from fastapi.testclient import TestClient
from servers.postgres import Postgres, start
from sqlalchemy import inspect, make_url

from aerie_api.app import create_app
from aerie_api.auth import local
from aerie_api.db import Database
from aerie_api.house import House, Parts
from aerie_api.jobs.service import JobService
from aerie_api.leases.repository import UnitRepository
from aerie_api.settings import Settings
from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import Slice, StageName, unit_key
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.jobs.wire import Assignment, Commit, Output
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import UnitWriter
from eagle3_core.objects.protocol import ObjectStore

QUEUES = ["prep", "extract", "train", "evaluate"]
ALL_STAGES = ["prepare", "canary", "generate", "extract", "vocab", "train", "evaluate", "package"]
REPORT: dict[str, Any] = {
    "verdict": "pass",
    "acceptance_length": {
        "mean": 2.1, "macro": 2.0, "ci_low": 1.9, "ci_high": 2.3,
        "by_task": {"qa": {"mean": 2.1, "ci_low": 1.9, "ci_high": 2.3, "prompts": 4}},
    },
    "acceptance_by_position": [0.6, 0.5, None], "lossless": True, "looping_share": 0.0, "seen_ngram_share": 0.1,
    "prompts": 4,
}  # fmt: skip
RESULTS: dict[str, dict[str, Any]] = {
    "prepare": {"samples": 4, "eval_prompts": 4},
    "package": {"digest": "d" * 64, "report": REPORT},
}


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Looked:
    sources: dict[str, str]
    warnings: list[str] = field(default_factory=list)
    train_peak_bytes: int = 3 << 30


def fake_preflight(spec: JobSpec, _roots: Sequence[Path]) -> Looked:
    uris = [d.uri for d in (*spec.datasets, *spec.evaluation.prompts)]
    return Looked({"verifier": "v" * 64, **{uri: "a" * 64 for uri in uris}}, ["looks small"])


def fake_reduce(stage: StageName, _spec: JobSpec, results: list[dict[str, Any]]) -> dict[str, Any]:
    return results[0] if len(results) == 1 else {"units": len(results), "of": stage}


def job_document(name: str = "fox", **sections: Any) -> dict[str, Any]:
    """A job with 4 samples and 4 prompts in units of 2."""
    document: dict[str, Any] = {
        "name": name,
        "verifier": {"model": "/models/v"},
        "datasets": [{"uri": "file:///data/train.jsonl"}],
        "data": {"unit_samples": 2},
        "evaluation": {"prompts": [{"uri": "file:///data/eval.jsonl"}], "unit_prompts": 2},
    }
    for section, value in sections.items():
        old = document.get(section)
        document[section] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return document


class Api:
    """An API and what one does with it. `parts` and `settings` differ from the defaults by what is given."""

    def __init__(self, folder: Path, **given: Any) -> None:
        self.folder = folder
        self.results = RESULTS
        self.clock = given.pop("clock", None) or Clock()
        self.store: ObjectStore = given.pop("store", None) or LocalStore(folder / "objects")
        self.parts = Parts(
            preflight=given.pop("preflight", fake_preflight), reduce=given.pop("reduce", fake_reduce), clock=self.clock,
            store=self.store, broker=given.pop("broker", None), reaper=given.pop("watched", False),
        )  # fmt: skip
        self.settings = Settings(
            run_dir=folder / "run", data_dir=folder / "data", **{"retry_base_s": 10.0, "keys_required": False, **given}
        )
        self.app = create_app(self.settings, self.parts)
        self.http = TestClient(self.app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)

    def __enter__(self) -> Api:
        self.http.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.http.__exit__(None, None, None)

    @property
    def jobs(self) -> JobService:
        """The service, for the user of an embedded house."""
        return self.house.jobs.of(local())

    @property
    def house(self) -> House:
        return self.app.state.house

    def post(self, document: dict[str, Any] | None = None, **headers: str) -> dict[str, Any]:
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        answer = self.http.post("/jobs", json=document or job_document(), headers=named)
        assert answer.status_code == 202, answer.text
        return answer.json()

    def job(self, job_id: str) -> dict[str, Any]:
        return self.http.get(f"/jobs/{job_id}").json()

    def stage(self, job_id: str, name: str) -> dict[str, Any]:
        return next(s for s in self.job(job_id)["stages"] if s["name"] == name)

    def unit_states(self, job_id: str, stage: StageName) -> list[str]:
        with self.house.db.read() as session:
            return [unit.state for unit in UnitRepository(session).of_stage(job_id, stage)]

    def events(self, job_id: str) -> list[dict[str, Any]]:
        return self.http.get(f"/jobs/{job_id}/events?limit=1000").json()["data"]

    def said(self, job_id: str) -> str:
        return "\n".join(e["message"] for e in self.events(job_id))

    def stored(self) -> str:
        """Every value of every row, as the database has it."""
        with self.house.db.engine.connect() as connection:
            tables = inspect(connection).get_table_names()
            return "\n".join(
                repr(row) for table in tables for row in connection.exec_driver_sql(f"SELECT * FROM {table}")
            )

    def worker(self, worker_id: str = "w1", incarnation: str = "1") -> Worker:
        return Worker(self, worker_id, incarnation)

    def reach(self, stage: str) -> tuple[Worker, Assignment]:
        """Run until a worker holds a unit of `stage`."""
        worker = self.worker()
        while (unit := worker.claim()) is not None and unit.stage != stage:
            worker.commit(unit)
        assert unit is not None
        return worker, unit


class Worker:
    """A worker that speaks the real routes."""

    def __init__(self, api: Api, worker_id: str, incarnation: str) -> None:
        self.api = api
        self.worker_id = worker_id
        self.incarnation = incarnation

    def ask(self, token: str | None = None, **body: Any) -> Any:
        given = {"worker_id": self.worker_id, "incarnation": self.incarnation, "queues": QUEUES, "wait_s": 0, **body}
        headers = {"Authorization": f"Bearer {token or self.api.house.worker_token}"}
        return self.api.http.post("/internal/v1/claim", json=given, headers=headers)

    def claim(self, **body: Any) -> Assignment | None:
        answer = self.ask(**body)
        assert answer.status_code in (200, 204), answer.text
        return Assignment.model_validate_json(answer.content) if answer.status_code == 200 else None

    def take(self, **body: Any) -> Assignment:
        unit = self.claim(**body)
        assert unit is not None, "nothing to claim"
        return unit

    def tell(self, unit: Assignment, what: str, body: Any, token: str | None = None) -> Any:
        return self.api.http.post(
            f"/internal/v1/units/{unit.unit_run_id}/{what}", content=body if isinstance(body, str | bytes) else None,
            json=None if isinstance(body, str | bytes) else body,
            headers={"Authorization": f"Bearer {token or unit.token}", "Content-Type": "application/json"},
        )  # fmt: skip

    def stops(self, known: Mapping[str, int] | None = None) -> Any:
        """What is to stop of what it holds, asked without waiting."""
        question = {
            "worker_id": self.worker_id,
            "incarnation": self.incarnation,
            "known": dict(known or {}),
            "wait_s": 0,
        }
        headers = {"Authorization": f"Bearer {self.api.house.worker_token}"}
        answer = self.api.http.post("/internal/v1/stops", json=question, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["units"]

    def beat(self, unit: Assignment, **body: Any) -> Any:
        return self.tell(unit, "heartbeat", body)

    def made(self, unit: Assignment, content: str = "", also: bool = False) -> Commit:
        """The commit that a real child would send, its objects written."""
        result = RESULTS.get(unit.stage, {"value": unit.unit.index})
        commit = Commit(output=self._output(unit, unit.stage, unit.key, result, content), seconds=2.0)
        if also:
            piece = Slice(unit.unit.index, unit.unit.start, unit.unit.stop)
            inputs = {"generate": [commit.output.manifest.content]}
            key = unit_key("extract", unit.spec, piece, inputs, unit.sources, unit.tenant)
            commit.also.append(self._output(unit, "extract", key, {"value": unit.unit.index}, content))
        return commit

    def _output(self, unit: Assignment, stage: StageName, key: str, result: dict[str, Any], content: str) -> Output:
        place = (unit.unit.index, unit.unit.start, unit.unit.stop)
        writer = UnitWriter(
            self.api.store,
            tenant=unit.tenant,
            job_id=unit.job_id,
            stage=stage,
            unit=place,
            unit_key=key,
            fence=unit.fence,
        )
        epochs = unit.spec.training.epochs if stage == "train" else ""
        writer.add_bytes("out.bin", f"{stage} {place} {epochs} {content}".encode())
        if stage == "package":
            writer.add_bytes("sglang/config.json", b"{}")
        return Output(stage=stage, key=key, manifest=writer.commit(result), result=result)

    def commit(self, unit: Assignment, commit: Commit | None = None, **made: Any) -> Any:
        return self.tell(unit, "commit", (commit or self.made(unit, **made)).model_dump(mode="json"))

    def fail(self, unit: Assignment, cause: str = "failed", retryable: bool = True, code: str = "unit.crashed") -> Any:
        problem = AerieError("it broke", remedy="mend it").problem() | {"code": code}
        return self.tell(unit, "fail", {"cause": cause, "problem": problem, "retryable": retryable})

    def run(self, limit: int = 100, also: bool = False) -> list[str]:
        """Work until there is nothing to do; the stages of the units that were run."""
        ran: list[str] = []
        while len(ran) < limit and (unit := self.claim()) is not None:
            assert self.commit(unit, also=also and unit.stage == "generate").status_code == 200
            ran.append(unit.stage)
        return ran


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """A Postgres server for all tests of the session."""
    server = start(tmp_path_factory.mktemp("postgres"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def migrated(postgres: Postgres) -> str:
    """The name of a database with today's tables and nothing in them, to be copied."""
    url = postgres.database()
    Database(make_url(url)).close()
    return url.rpartition("/")[2]


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """Makes database URLs: the same one for the same folder, empty when first asked for."""
    if request.param == "sqlite":
        yield lambda folder: ""
        return
    server: Postgres = request.getfixturevalue("postgres")
    template: str = request.getfixturevalue("migrated")
    made: dict[str, str] = {}

    def url(folder: str) -> str:
        if folder not in made:
            made[folder] = server.database(template)
        return made[folder]

    yield url
    for given in made.values():
        server.drop(given)


@pytest.fixture
def make_api(tmp_path: Path, database: Callable[[str], str]) -> Iterator[Callable[..., Api]]:
    """Builds an API that ends with the test; one with another `folder` shares nothing with it."""
    opened: list[Api] = []

    def make(folder: str = "a", **given: Any) -> Api:
        api = Api(tmp_path / folder, **{"database_url": database(folder), **given})
        opened.append(api.__enter__())
        return api

    yield make
    for api in reversed(opened):
        api.__exit__()


@pytest.fixture
def api(make_api: Callable[..., Api]) -> Api:
    return make_api()


@pytest.fixture
def document() -> Callable[..., dict[str, Any]]:
    return job_document


@pytest.fixture
def all_stages() -> list[str]:
    return ALL_STAGES


@pytest.fixture
def closed(make_api: Callable[..., Any]) -> Any:
    """An API that turns away whoever has no key."""
    return make_api(keys_required=True)
