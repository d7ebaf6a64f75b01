"""The real API process does what its OpenAPI document says, whatever it is sent: generated requests, bounded in number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from house import wait_for
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from aerie_api.guards import WORKER_PREFIX
from eagle3_core.testing import tiny_job

pytestmark = pytest.mark.slow
SNAPSHOT = Path(__file__).parents[3] / "docs" / "openapi.json"
LONG_POLLS = ("/internal/v1/claim", "/internal/v1/stops")
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance, unsupported_method, ignored_auth,
]  # fmt: skip


@dataclass
class Served:
    """A running API process that asks for keys, and ids of what is there."""

    url: str
    admin_key: str
    worker_token: str
    ids: dict[str, str]

    def headers(self, path: str) -> dict[str, str]:
        token = self.worker_token if path.startswith(WORKER_PREFIX) else self.admin_key
        return {"Authorization": f"Bearer {token}"}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The real process, with its real look at jobs, over one of the databases."""
    folder = tmp_path_factory.mktemp("served")
    job = tiny_job(folder)
    environment = {
        **os.environ, "AERIE_RUN_DIR": str(folder / "run"), "AERIE_DATA_DIR": str(folder / "data"),
        "AERIE_FILE_ROOTS": str(folder), "AERIE_KEYS_REQUIRED": "1", "AERIE_RATE_PER_MINUTE": "0",
    }  # fmt: skip
    if request.param == "postgres":
        server = request.getfixturevalue("postgres")
        environment["AERIE_DATABASE_URL"] = server.database(request.getfixturevalue("migrated"))
    with (folder / "api.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "aerie_api"], env=environment, stderr=log, stdout=log)
    try:
        run = folder / "run"
        wait_for("the API", (run / "server.json").exists)
        url = json.loads((run / "server.json").read_text())["url"]
        made = Served(url, (run / "admin.key").read_text().strip(), (run / "worker.token").read_text().strip(), {})
        made.ids = _filled(made, job)
        yield made
        assert process.poll() is None, "the process died of what it was sent"
    finally:
        process.terminate()
        process.wait(60)


def _filled(served: Served, job: dict[str, Any]) -> dict[str, str]:
    """Have one of everything."""
    with httpx.Client(base_url=served.url, headers=served.headers("/"), timeout=60) as http:
        deletion = http.post("/storage/deletions", json={}).json()["id"]
        posted = http.post("/jobs", json=job)
        assert posted.status_code == 202, posted.text
        assert http.post("/tenants", json={"id": "red"}).status_code == 201
        key = http.post("/keys", json={"name": "spare", "scopes": ["jobs:read"]}).json()["id"]
        claim = {"worker_id": "w1", "incarnation": "1", "queues": ["prep"], "wait_s": 0}
        unit = http.post("/internal/v1/claim", json=claim, headers=served.headers(WORKER_PREFIX)).json()["unit_run_id"]
    return {"job_id": posted.json()["id"], "tenant_id": "red", "key_id": key, "worker_id": "w1", "unit_run_id": unit,
            "deletion_id": deletion, "name": "config.json"}  # fmt: skip


described = schemathesis.openapi.from_dict(json.loads(SNAPSHOT.read_text()))


@described.parametrize()
@described.given(known=st.booleans())
@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_operation_answers_as_it_is_described(served: Served, case: Any, known: bool):
    """Half of the cases are about what is there."""
    if known:
        case.path_parameters.update({name: served.ids[name] for name in case.path_parameters})
    if isinstance(case.body, dict) and case.path in LONG_POLLS:
        case.body["wait_s"] = 0  # waiting is no fault, only long
    case.headers = {**(case.headers or {}), "Accept": "application/json"}  # a stream of a living job has no end
    case.call_and_validate(base_url=served.url, headers=served.headers(case.path), checks=CHECKS)
