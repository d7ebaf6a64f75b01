"""Tenants: nobody sees what is another's, nobody gets in without a key, nobody takes more than their share."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from house import wait_for
from houses import all_routes
from people import admin, bearer, key, tenant
from sqlalchemy import select
from tenant_filter import unfiltered

from aerie_api.auth import SCOPES, new_key
from aerie_api.guards import OPEN, WORKER_PREFIX
from aerie_api.tables import CommitRow, Event, Job, Tenant, Unit
from aerie_api.tenants.buckets import MemoryBuckets, Rate
from aerie_api.tenants.gate import BadAdminKey


def routes(api: Any) -> list[tuple[str, str]]:
    """Method and path of every public operation that the OpenAPI document lists."""
    paths = api.app.openapi()["paths"]
    return [
        (method.upper(), path)
        for path, operations in paths.items()
        if not path.startswith(WORKER_PREFIX) and path not in OPEN
        for method in operations
    ]


def filled(path: str, job_id: str) -> str:
    return path.replace("{job_id}", job_id).replace("{name}", "out.bin")


# -- who gets in


def test_nobody_gets_in_without_a_key_on_any_route(closed):
    assert len(routes(closed)) > 15
    for prefix in ("", "/v1"):
        for method, path in routes(closed):
            body = {} if method in ("POST", "PATCH") else None
            answer = closed.http.request(method, prefix + filled(path, "job_x"), json=body)
            assert (answer.status_code, answer.json()["code"]) == (401, "auth.key"), (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
    assert closed.http.get("/healthz").status_code == closed.http.get("/readyz").status_code == 200


def test_every_route_names_the_scope_that_it_takes(closed):
    for method, path in routes(closed):
        operation = closed.app.openapi()["paths"][path][method.lower()]["operationId"]
        route = next(r for r in all_routes(closed.app) if r.operation_id == operation)
        scopes = [s for d in route.dependant.dependencies if (s := getattr(d.call, "aerie_scope", None))]
        assert len(scopes) == 1, f"{method} {path} names {scopes}"
        if method != "GET" and path != "/jobs:plan":
            assert scopes != ["jobs:read"], f"{method} {path} changes something"


@pytest.mark.parametrize(
    "odd", ["Bearer", "Bearer aerie_x_y", "Basic YTpi", "Bearer aerie_" + "0" * 16 + "_" + "A" * 43]
)
def test_what_is_no_key_opens_nothing(closed, odd):
    answer = closed.http.get("/jobs", headers={"Authorization": odd})
    assert (answer.status_code, answer.json()["code"]) == (401, "auth.key")


def test_a_key_may_do_what_its_scopes_say(closed, document):
    reader = tenant(closed, "red", ["jobs:read"])
    assert closed.http.get("/jobs", headers=reader).status_code == 200
    refused = closed.http.post("/jobs", json=document(), headers=reader)
    assert (refused.status_code, refused.json()["code"]) == (403, "auth.scope")
    for path in ("/tenants", "/keys", "/audit"):
        assert closed.http.get(path, headers=reader).json()["code"] == "auth.scope"
    me = closed.http.get("/me", headers=reader).json()
    assert (me["tenant"]["id"], me["scopes"]) == ("red", ["jobs:read"])


def test_a_key_ends_when_it_expires_or_is_revoked(closed):
    tenant(closed, "red")
    short, long = key(closed, "red", expires_in_s=60), key(closed, "red")
    assert closed.http.get("/jobs", headers=short["headers"]).status_code == 200
    closed.clock.pass_(61)
    assert closed.http.get("/jobs", headers=short["headers"]).status_code == 401
    assert closed.http.get("/jobs", headers=long["headers"]).status_code == 200
    closed.http.delete(f"/keys/{long['id']}", headers=admin(closed))
    assert closed.http.get("/jobs", headers=long["headers"]).status_code == 401
    assert closed.http.post(f"/keys/{long['id']}/rotate", headers=admin(closed)).json()["code"] == "key.over"


def test_a_rotated_key_counts_until_its_users_have_changed_over(closed):
    tenant(closed, "red")
    old = key(closed, "red")
    place = f"/keys/{old['id']}/rotate"
    new = closed.http.post(place, json={"overlap_s": 60}, headers=admin(closed)).json()
    assert (new["tenant"], new["scopes"], new["name"]) == (old["tenant"], old["scopes"], old["name"])
    for headers in (old["headers"], bearer(new["secret"])):
        assert closed.http.get("/jobs", headers=headers).status_code == 200
    closed.clock.pass_(61)
    assert closed.http.get("/jobs", headers=old["headers"]).status_code == 401
    assert closed.http.get("/jobs", headers=bearer(new["secret"])).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("DELETE", "", None), ("POST", "/rotate", {"overlap_s": 0})],
    ids=["revoked", "rotated"],
)
def test_a_stream_ends_with_the_key_that_opened_it(closed, document, monkeypatch, method, path, body):
    monkeypatch.setattr("aerie_api.jobs.stream.QUIET_S", 3600.0)
    red = key(closed, "default")
    job = closed.http.post("/jobs", json=document(), headers=red["headers"]).json()["id"]
    streams = {**red["headers"], "Accept": "text/event-stream"}
    with ThreadPoolExecutor(1) as beside:
        reading = beside.submit(closed.http.get, f"/jobs/{job}/events", headers=streams)
        try:
            wait_for("the reader", lambda: closed.house.news._waiters)
            ended = closed.http.request(method, f"/keys/{red['id']}{path}", json=body, headers=admin(closed))
            assert ended.is_success, ended.text
            said = reading.result(timeout=60)
        finally:
            closed.house.news.close()  # whatever happened, nobody waits on
    assert (said.status_code, "event: job.created" in said.text) == (200, True)
    assert closed.http.get(f"/jobs/{job}/events", headers=streams).status_code == 401


def test_a_secret_is_kept_nowhere(closed, caplog):
    with caplog.at_level(logging.DEBUG):
        tenant(closed, "red")
        made = key(closed, "red")
        closed.http.get("/jobs", headers=made["headers"])
        listed = closed.http.get("/keys", headers=admin(closed)).text
    secret = made["secret"].rpartition("_")[2] or made["secret"]
    assert made["id"] in closed.stored() + listed
    assert secret not in closed.stored() + listed + caplog.text


def test_the_first_admin_key_is_made_once_and_privately(make_api):
    api = make_api(keys_required=True)
    file = api.folder / "run" / "admin.key"
    first = file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    api.__exit__()
    again = make_api(keys_required=True)
    assert file.read_text() == first
    file.unlink()
    again.__exit__()
    make_api(keys_required=True)
    assert not file.exists(), "there is an admin key already"


def test_the_operator_may_bring_the_first_admin_key(make_api, tmp_path):
    _, given, _ = new_key()
    file = tmp_path / "given.key"
    file.write_text(given + "\n")
    api = make_api(keys_required=True, admin_key_file=file)
    assert api.http.get("/tenants", headers=bearer(given)).status_code == 200
    file.write_text("changethis")
    with pytest.raises(BadAdminKey):
        api.house.gate.make_first_key(file)


# -- who sees what


def test_what_belongs_to_another_tenant_is_not_there_on_any_route(closed, document):
    red, blue = tenant(closed, "red"), tenant(closed, "blue")
    job = closed.http.post("/jobs", json=document(), headers=red).json()["id"]
    closed.worker().run()
    assert closed.http.get(f"/jobs/{job}", headers=red).json()["status"] == "succeeded"
    tried = 0
    for method, path in routes(closed):
        if "{job_id}" not in path:
            continue
        for headers in (blue, {**blue, "Accept": "text/event-stream"}):
            answer = closed.http.request(method, filled(path, job), headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (404, "job.missing"), (method, path, answer.text)
            tried += 1
    assert tried >= 2 * 9
    for path in ("/jobs", "/drafters"):
        assert closed.http.get(path, headers=blue).json()["data"] == []
        assert len(closed.http.get(path, headers=red).json()["data"]) == 1
    assert closed.http.get(f"/jobs?after={job}", headers=blue).json()["code"] == "job.missing"
    assert closed.http.get(f"/jobs/{job}", headers=red).json()["status"] == "succeeded"


def test_a_job_is_looked_at_with_its_own_tenant_s_folders(make_api, document, tmp_path):
    asked = []

    def look(spec, roots):
        asked.append([str(root) for root in roots])
        uris = [source.uri for source in (*spec.datasets, *spec.evaluation.prompts)]
        return SimpleNamespace(sources=dict.fromkeys(["verifier", *uris], "d"), warnings=[], train_peak_bytes=1)

    api = make_api(keys_required=True, preflight=look, file_roots=(tmp_path / "{tenant}", tmp_path / "models"))
    for name in ("red", "blue"):
        assert api.http.post("/jobs:plan", json=document(), headers=tenant(api, name)).status_code == 200
    assert asked == [[f"{tmp_path}/red", f"{tmp_path}/models"], [f"{tmp_path}/blue", f"{tmp_path}/models"]]


def test_tenants_share_neither_names_nor_keys_nor_results(closed, document):
    red, blue = tenant(closed, "red"), tenant(closed, "blue")
    same = {"Idempotency-Key": "k"}
    first = closed.http.post("/jobs", json=document(), headers={**red, **same}).json()
    closed.worker().run()
    second = closed.http.post("/jobs", json=document(), headers={**blue, **same})
    assert second.status_code == 202
    assert "idempotency-replayed" not in second.headers
    assert second.json()["id"] != first["id"]
    assert closed.worker().run(), "nothing of another tenant is reused"
    shown = closed.http.get(f"/jobs/{second.json()['id']}", headers=blue).json()
    assert shown["status"] == "succeeded"
    assert not any(stage["reused"] for stage in shown["stages"])


def test_a_query_without_a_tenant_is_seen():
    assert unfiltered(select(Job)) == {"jobs"}
    assert unfiltered(select(Job).where(Job.tenant == "a")) == set()
    assert unfiltered(select(Event).join(Job, Job.id == Event.job_id).where(Job.tenant == "a")) == {"events"}
    assert unfiltered(select(Job.id).where(Job.tenant == "a", select(Unit).where(Unit.job_id == Job.id).exists())) == {
        "units"
    }
    assert unfiltered(select(CommitRow.key)) == {"commits"}


# -- how often


def test_a_key_that_asks_too_often_is_told_when_to_come_back(make_api):
    api = make_api(keys_required=True, rate_burst=3, rate_per_minute=60)
    red, other = tenant(api, "red"), key(api, "default")["headers"]
    api.clock.pass_(60)
    left = [api.http.get("/jobs", headers=red) for _ in range(3)]
    assert [a.headers["ratelimit-remaining"] for a in left] == ["2", "1", "0"]
    assert (left[0].headers["ratelimit-limit"], left[0].headers["ratelimit-policy"]) == ("3", "3;w=3")
    refused = api.http.get("/jobs", headers=red)
    assert (refused.status_code, refused.json()["code"]) == (429, "rate.limited")
    assert (refused.headers["retry-after"], refused.headers["ratelimit-remaining"]) == ("1", "0")
    assert api.http.get("/jobs", headers=other).status_code == 200
    api.clock.pass_(1)
    assert api.http.get("/jobs", headers=red).status_code == 200
    assert api.http.get("/jobs", headers=red).status_code == 429


def test_buckets_in_memory_do_not_grow_without_end(monkeypatch):
    monkeypatch.setattr("aerie_api.tenants.buckets.MAX_BUCKETS", 10)
    buckets = MemoryBuckets(lambda: 0.0)
    for number in range(100):
        assert buckets.take(str(number), Rate(2, 60)).allowed
    assert len(buckets._buckets) == 10


# -- how much


def test_jobs_over_the_limit_wait_and_say_so(closed, document):
    red = tenant(closed, "red", max_running_jobs=1, max_living_jobs=2)
    one, two = (closed.http.post("/jobs", json=document(n), headers=red).json()["id"] for n in ("fox", "hen"))
    full = closed.http.post("/jobs", json=document("owl"), headers=red)
    assert (full.status_code, full.json()["code"]) == (429, "quota.jobs")
    first = closed.worker("w1").take()
    assert first.job_id == one
    assert closed.worker("w2").claim() is None
    why = closed.http.get(f"/jobs/{two}", headers=red).json()["why_queued"]
    assert why == "quota: 1 of 1 jobs run at the same time"
    closed.worker("w1").commit(first)
    ran = [closed.worker("w1").run()]
    assert ran
    assert {closed.http.get(f"/jobs/{j}", headers=red).json()["status"] for j in (one, two)} == {"succeeded"}


def test_gpu_hours_are_counted_while_units_run_and_end_what_may_start(closed, document):
    red = tenant(closed, "red", gpu_hours=10)
    job = closed.http.post("/jobs", json=document(), headers=red).json()["id"]
    worker = closed.worker()
    unit = worker.take(gpus=8)
    for _ in range(125):
        closed.clock.pass_(36)
        worker.beat(unit)
    usage = closed.http.get("/me", headers=red).json()["tenant"]["usage"]
    assert usage["gpu_hours"] == pytest.approx(10.0)
    worker.commit(unit)
    assert closed.http.get("/me", headers=red).json()["tenant"]["usage"]["gpu_hours"] == pytest.approx(10.0)
    assert worker.claim() is None
    why = closed.http.get(f"/jobs/{job}", headers=red).json()["why_queued"]
    assert why == "quota: 10.0 of 10 GPU-hours of the last 30 days are used"
    closed.http.patch("/tenants/red", json={"gpu_hours": 11}, headers=admin(closed))
    assert worker.take().job_id == job


def test_a_changed_limit_leaves_the_others_alone(closed):
    tenant(closed, "red", max_running_jobs=3, weight=2)
    changed = closed.http.patch("/tenants/red", json={"max_running_jobs": None}, headers=admin(closed)).json()
    assert (changed["limits"]["max_running_jobs"], changed["limits"]["weight"]) == (None, 2)
    assert closed.http.get("/tenants/none", headers=admin(closed)).json()["code"] == "tenant.missing"
    assert closed.http.post("/tenants", json={"id": "red"}, headers=admin(closed)).json()["code"] == "tenant.exists"


# -- the record


def test_the_audit_log_says_who_did_what_in_which_request(closed, document):
    red = tenant(closed, "red")
    job = closed.http.post("/jobs", json=document(), headers={**red, "X-Request-ID": "req-1"}).json()["id"]
    closed.http.post(f"/jobs/{job}/cancel", headers={**red, "X-Request-ID": "req-2"})
    closed.http.post(f"/jobs/{job}/cancel", headers=red)  # refused: it has ended
    closed.http.delete(f"/jobs/{job}", headers={**red, "X-Request-ID": "req-3"})
    entries = closed.http.get("/audit?tenant=red", headers=admin(closed)).json()["data"]
    assert [(e["request_id"], e["action"], e["target"]) for e in entries] == [
        ("req-3", "job.delete", job), ("req-2", "job.cancel", job), ("req-1", "job.create", job),
    ]  # fmt: skip
    assert entries[0]["key"] in red["Authorization"]
    operators = closed.http.get("/audit?tenant=default&limit=2", headers=admin(closed)).json()
    assert [e["action"] for e in operators["data"]] == ["key.create", "tenant.create"]
    older = closed.http.get(f"/audit?tenant=default&after={operators['last_id']}", headers=admin(closed)).json()
    assert older["data"] == []


def test_names_write_no_lines_into_any_log(closed, caplog):
    for odd in (
        {"name": "a\nb", "scopes": ["jobs:read"]},
        {"name": "a", "scopes": ["root"]},
        {"name": "a", "tenant": "A B"},
    ):
        assert closed.http.post("/keys", json=odd, headers=admin(closed)).status_code == 422
    with caplog.at_level(logging.INFO, "aerie_api.access"):
        closed.http.get("/jobs", headers={"Authorization": "Bearer a\\nforged", "X-Request-ID": "a%0aforged"})
    assert "forged" not in caplog.text


def test_every_scope_can_be_given(closed):
    assert key(closed, "default", list(SCOPES))["scopes"] == list(SCOPES)


def test_a_tenant_that_is_not_there_gets_no_key(closed):
    answer = closed.http.post("/keys", json={"tenant": "none", "name": "x", "scopes": ["admin"]}, headers=admin(closed))
    assert answer.json()["code"] == "tenant.missing"
    with closed.house.db.read() as session:
        assert [t.id for t in session.scalars(select(Tenant))] == ["default"]
