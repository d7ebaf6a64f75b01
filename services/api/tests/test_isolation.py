"""Another tenant's ids, on every operation that the OpenAPI document lists: each gives what an id gives that never was.

The operations come from the document, and an id in an address whose owner this file does not know fails the test: a new
route is tried here before it can be forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from houses import Tenants, all_routes, operations, public_operations, worker_operations

IDS: dict[str, str] = {
    "job_id": "job",
    "name": "artifact",
    "tenant_id": "tenant",
    "key_id": "key",
    "worker_id": "worker",
    "deletion_id": "deletion",
}
"""What the ids in addresses are ids of."""
CURSORS: dict[str, str] = {"/jobs": "job", "/drafters": "drafter", "/workers": "worker"}
"""What `after` is, on the lists that a tenant may read."""
BODIES: dict[str, Any] = {
    "rotate_key": {}, "limit_tenant": {"weight": 9}, "create_key": {"name": "x", "scopes": ["jobs:read"]},
    "create_tenant": {"id": "green"}, "create_deletion": {"dataset": "file:///data/train.jsonl", "everything": True},
}  # fmt: skip
"""Bodies that would be taken from somebody who may."""
OWN = frozenset({"create_job", "plan_job", "create_deletion"})
"""Operations without ids that change what is the caller's own."""


MANIFEST = {"key": "m", "blake3": "0" * 64, "content": "0" * 64}
RESULT = {"stage": "prepare", "key": "k" * 64, "manifest": MANIFEST, "result": {}}
WORKER_BODIES: dict[str, Any] = {
    "claim_unit": {"worker_id": "w", "incarnation": "1", "queues": ["prep"], "wait_s": 0},
    "hear_stops": {"worker_id": "w", "incarnation": "1", "known": {}, "wait_s": 0},
    "heartbeat_unit": {}, "commit_unit": {"output": RESULT, "seconds": 1.0},
    "fail_unit": {"cause": "failed", "problem": {"code": "x", "detail": "d"}, "retryable": True},
    "lend_object": {"do": "get", "key": "red/prepare/x"},
}  # fmt: skip
"""Bodies that would be taken from the fleet."""


@pytest.fixture
def two(make_api: Callable[..., Any], document: Callable[..., Any]) -> Tenants:
    """`red` with a finished job, a running one and a finished drafter; `blue` with every scope but the operator's."""
    tenants = Tenants(make_api(keys_required=True))
    tenants.add("red", ["jobs:read", "jobs:write", "deploy"])
    tenants.add("blue", ["jobs:read", "jobs:write", "deploy"])
    api = tenants.api
    gone = tenants.ask("red", "POST", "/storage/deletions", json={})
    assert gone.status_code == 201, gone.text
    done = tenants.post("red", document("secret-fox", metadata={"note": "red-metadata"}))
    api.worker("machine-1").run()
    running = tenants.post("red", document("secret-hen", training={"epochs": 7}))
    unit = api.worker("machine-1").take()
    line = {"at": 1.0, "level": "info", "text": "red-log-line"}
    assert api.worker("machine-1").beat(unit, logs=[line]).status_code == 200
    tenants.ids = {
        "job": done["id"], "running": running["id"], "artifact": "out.bin", "tenant": "red", "key": tenants.keys["red"],
        "worker": "machine-1", "drafter": "secret-fox", "unit": unit.unit_run_id, "deletion": gone.json()["id"],
    }  # fmt: skip
    return tenants


NEVER = {
    "job": "job_" + "0" * 24, "artifact": "none.bin", "tenant": "nobody", "key": "0" * 16, "worker": "nowhere",
    "drafter": "no-such-drafter", "deletion": "del_never-was",
}  # fmt: skip


def told(answer: Any, ids: dict[str, str]) -> tuple[int, str]:
    """An answer without what differs by itself: the request's id, and the ids that were asked for."""
    text = answer.text.replace(answer.headers["x-request-id"], "REQUEST")
    for kind, value in ids.items():
        text = text.replace(value, kind.upper())
    return answer.status_code, text


def filled(path: str, ids: dict[str, str]) -> str:
    return re.sub(r"{(\w+)(?::path)?}", lambda found: ids[IDS[found[1]]], path)


def test_no_route_hides_from_the_tests_here(two):
    described = {operation.name for operation in operations(two.api)}
    assert {route.operation_id for route in all_routes(two.api.app)} == described
    assert len(described) > 30


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_an_id_of_another_tenant_is_answered_like_one_that_never_was(two, prefix):
    before, asked = two.stored_for("red"), set[str]()
    for operation in public_operations(two.api):
        if not operation.ids:
            continue
        for accept in ("application/json", "text/event-stream"):
            theirs, never = (
                two.ask("blue", operation.method, prefix + filled(operation.path, ids), json=BODIES.get(operation.name),
                        headers={"Accept": accept})
                for ids in (two.ids, NEVER)
            )  # fmt: skip
            assert theirs.status_code in (403, 404), f"{operation}: {theirs.status_code} {theirs.text}"
            assert told(theirs, two.ids) == told(never, NEVER), operation
        asked.add(operation.name)
    assert {"get_job", "delete_job", "get_artifact", "get_deletion", "revoke_key", "limit_tenant"} <= asked
    assert two.stored_for("red") == before, "something of red's was changed"


def test_no_list_shows_or_can_be_led_to_what_is_anothers(two):
    secrets = {*two.ids.values(), "red-metadata", "red-log-line", "secret-hen"} - {two.ids["worker"], "out.bin"}
    tried = 0
    for operation in public_operations(two.api):
        if operation.ids or operation.method != "GET":
            continue
        queries: list[dict[str, Any]] = [{}]
        if "after" in operation.query and (kind := CURSORS.get(operation.path)) is not None:
            theirs, never = (
                two.ask("blue", "GET", operation.path, params={"after": ids[kind]}) for ids in (two.ids, NEVER)
            )
            assert kind == "worker" or told(theirs, two.ids) == told(never, NEVER), operation
        queries += [{"name": "secret-fox"}] * ("name" in operation.query) + [{"tenant": "red"}] * (
            "tenant" in operation.query
        )
        for query in queries:
            answer = two.ask("blue", "GET", operation.path, params=query)
            assert answer.status_code in (200, 403), operation
            found = [secret for secret in secrets if re.search(rf"\b{re.escape(secret)}\b", answer.text)]
            assert not found, f"{operation} {query} shows {found}"
            tried += 1
    assert tried >= 9


def test_only_the_operator_changes_tenants_keys_and_workers(two):
    """What an operation changes for others takes the scope `admin`; an operation without ids that takes less is listed here."""
    before = two.stored_for("red")
    for operation in public_operations(two.api):
        if operation.method == "GET" or operation.name in OWN or "job_id" in operation.ids:
            continue
        answer = two.ask("blue", operation.method, filled(operation.path, two.ids), json=BODIES.get(operation.name))
        assert (answer.status_code, answer.json()["code"]) == (403, "auth.scope"), operation
    assert two.stored_for("red") == before


def test_why_a_worker_was_set_aside_quotes_no_other_tenants_error(two, document):
    api = two.api
    for number in range(3):
        two.post("red", document(f"broken{number}", training={"epochs": 20 + number}))
    worker = api.worker("machine-2")
    for _ in range(3):
        worker.tell(unit := worker.take(), "fail", {
            "cause": "failed", "retryable": True,
            "problem": {"code": "unit.crashed", "status": 500, "title": "t", "detail": f"/data/red/secret {unit.job_id}"},
        })  # fmt: skip
        api.clock.pass_(1)
    shown = {who: two.ask(who, "GET", "/workers").json()["data"] for who in ("blue", "admin")}
    reasons = {
        who: next(w["reason"]["detail"] for w in found if w["id"] == "machine-2") for who, found in shown.items()
    }
    assert "/data/red/secret" in reasons["admin"]
    assert reasons["blue"] == "worker machine-2 failed several units in a row"


def test_a_job_waits_behind_nobody_that_it_may_not_know_of(two, document):
    mine = two.post("blue", document("owl"))
    why = two.ask("blue", "GET", f"/jobs/{mine['id']}").json()["why_queued"]
    assert why == "the workers that could take it are busy, or about to ask for work"


def test_a_deletion_of_a_data_set_that_two_tenants_named_takes_the_askers_results_only(two, document):
    two.post("blue", document("owl"))
    two.api.worker("machine-3").run()
    before, objects = two.stored_for("red"), {s.key for s in two.api.store.list("") if "red" in s.key}
    assert objects
    done = two.ask("blue", "POST", "/storage/deletions", json=BODIES["create_deletion"])
    assert (done.status_code, done.json()["status"]) == (201, "done"), done.text
    assert done.json()["objects"] > 0
    assert two.stored_for("red") == before
    assert {s.key for s in two.api.store.list("") if "red" in s.key} == objects


# -- tokens that are not what they are shown for


def test_a_key_is_no_worker_token_and_a_worker_token_no_key(two):
    api = two.api
    for token in (two.secrets["red"], two.secrets["admin"], "", "x" * 5000):
        refused = api.worker().ask(token=token or " ")
        assert (refused.status_code, refused.json()["code"]) == (401, "worker.unauthorised")
    for operation in public_operations(api):
        headers = {"Authorization": f"Bearer {api.house.worker_token}"}
        refused = api.http.request(operation.method, filled(operation.path, two.ids), headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (401, "auth.key"), operation


@pytest.mark.parametrize("token", ["", "x" * 9000, "worker-token", "\xe9\xff"])
def test_no_worker_s_operation_is_open_to_a_made_up_token(two, token):
    tried = [operation.name for operation in worker_operations(two.api)]
    assert sorted(tried) == ["claim_unit", "commit_unit", "fail_unit", "hear_stops", "heartbeat_unit", "lend_object"]
    before = two.stored_for("red")
    for operation in worker_operations(two.api):
        path = operation.path.replace("{unit_run_id}", two.ids["unit"])
        refused = two.api.http.request(
            operation.method, path, json=WORKER_BODIES[operation.name],
            headers={"Authorization": b"Bearer " + token.encode("latin-1")},
        )  # fmt: skip
        assert (refused.status_code, refused.json()["code"]) == (401, "worker.unauthorised"), operation
    assert two.stored_for("red") == before


@pytest.mark.parametrize("what", ["heartbeat", "commit", "fail"])
def test_a_token_opens_its_own_unit_only_and_only_while_it_holds_it(make_api, document, what):
    api = make_api()
    first, other = api.post(document("fox")), api.post(document("hen"))
    one, two_ = api.worker("w1"), api.worker("w2")
    mine, theirs = one.take(), two_.take()
    assert {mine.job_id, theirs.job_id} == {first["id"], other["id"]}
    body = {
        "heartbeat": {}, "commit": one.made(mine).model_dump(mode="json"),
        "fail": {"cause": "failed", "problem": {"code": "x", "detail": "d"}, "retryable": True},
    }[what]  # fmt: skip

    for token in (theirs.token, api.house.worker_token, mine.token[:-1], mine.token + "x", "x" * 9000):
        refused = one.tell(mine, what, body, token=token)
        assert (refused.status_code, refused.json()["code"]) == (401, "worker.unauthorised"), token[:20]
    api.clock.pass_(1000)
    api.house.claims.reap()
    refused = one.tell(mine, what, body)
    assert (refused.status_code, refused.json()["code"]) == (409, "lease.lost")
    api.clock.pass_(100)
    again = api.worker("w3").take()
    refused = one.tell(mine, what, body)
    assert (refused.status_code, refused.json()["code"]) == (409, "lease.lost")
    assert api.worker("w3").beat(again).status_code == 200
