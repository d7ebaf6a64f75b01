"""Whatever goes wrong, the answer is a problem document with a stable code, and no stranger gets in."""

from __future__ import annotations

import json
import logging

import pytest

from eagle3_core.errors import error_types


def check(answer, status, code):
    """`answer` is a whole problem document of this status and code; returns it."""
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (answer.status_code, problem["status"], problem["code"]) == (status, status, code), problem
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert problem["instance"].endswith(problem["request_id"])
    assert problem["type"] == f"urn:aerie:problem:{code}"
    assert problem["title"]
    assert problem["detail"]
    assert problem["remedy"]
    return problem


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "request.not_found"),
        ("GET", "/jobs/job_none", 404, "job.missing"),
        ("GET", "/jobs/job_none/events", 404, "job.missing"),
        ("GET", "/jobs/job_none/logs", 404, "job.missing"),
        ("GET", "/jobs/job_none/metrics", 404, "job.missing"),
        ("GET", "/jobs/job_none/artifacts/x", 404, "job.missing"),
        ("POST", "/jobs/job_none/cancel", 404, "job.missing"),
        ("POST", "/jobs/job_none/retry", 404, "job.missing"),
        ("DELETE", "/jobs", 405, "request.method"),
        ("GET", "/jobs?limit=0", 422, "request.invalid"),
        ("GET", "/jobs?status=resting", 422, "request.invalid"),
        ("GET", "/jobs/x/logs?stage=nap", 422, "request.invalid"),
    ],
)
def test_every_error_is_a_problem_document(api, method, path, status, code):
    check(api.http.request(method, path), status, code)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/jobs/"), ("POST", "/jobs/"), ("GET", "/v1/drafters/"), ("GET", "/healthz/"), ("GET", "/jobs//")],
)
def test_a_slash_too_many_is_said_and_not_redirected(api, method, path):
    problem = check(api.http.request(method, path, json={}, follow_redirects=False), 404, "request.not_found")

    assert "slash" in problem["remedy"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("DELETE", "/jobs", "GET, HEAD, POST"),
        ("PUT", "/v1/jobs", "GET, HEAD, POST"),
        ("POST", "/jobs/x", "GET, HEAD, DELETE"),
        ("GET", "/jobs/x/cancel", "POST"),
        ("HEAD", "/jobs/x/cancel", "POST"),
        ("GET", "/jobs:plan", "POST"),
        ("PATCH", "/drafters", "GET, HEAD"),
        ("DELETE", "/jobs/x/artifacts/a/b", "GET, HEAD"),
        ("OPTIONS", "/jobs", "GET, HEAD, POST"),
        ("BREW", "/healthz", "GET, HEAD"),
        ("GET", "/internal/v1/claim", "POST"),
        ("POST", "/openapi.json", "GET, HEAD"),
    ],
)
def test_a_method_that_is_not_answered_hears_of_all_that_are(api, method, path, allow):
    answer = api.http.request(method, path)

    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    if method != "HEAD":
        assert allow in check(answer, 405, "request.method")["detail"]


@pytest.mark.parametrize("path", ["/jobs", "/v1/jobs", "/jobs/{id}", "/jobs/{id}/logs", "/jobs/{id}/artifacts", "/drafters", "/healthz",
                                  "/readyz", "/openapi.json", "/jobs/none", "/nothing", "/jobs?limit=0"])  # fmt: skip
def test_head_answers_as_get_does_without_the_content(api, path):
    job = api.post()
    api.worker().run()
    path = path.format(id=job["id"])

    head, get = api.http.head(path), api.http.get(path)

    assert (head.status_code, head.content) == (get.status_code, b"")
    kept = {name: value for name, value in get.headers.items() if name not in ("x-request-id", "content-length")}
    assert {name: head.headers.get(name) for name in kept} == kept
    assert get.status_code >= 400 or head.headers["content-length"] == get.headers["content-length"]


def test_head_neither_reads_a_file_nor_waits_for_events(api):
    job = api.post()
    stream = api.http.head(f"/jobs/{job['id']}/events", headers={"Accept": "text/event-stream"})
    api.worker().run()
    file = api.http.head(f"/jobs/{job['id']}/artifacts/sglang/config.json")

    assert (stream.status_code, stream.content) == (200, b"")
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert (file.status_code, file.content, file.headers["content-length"]) == (200, b"", "2")


def test_head_with_a_known_tag_says_that_nothing_changed(api):
    job = api.post()
    tag = api.http.head(f"/jobs/{job['id']}").headers["etag"]

    assert api.http.head(f"/jobs/{job['id']}", headers={"If-None-Match": tag}).status_code == 304


def test_a_stream_of_a_job_that_is_not_there_is_a_problem_too(api):
    check(api.http.get("/jobs/none/events", headers={"Accept": "text/event-stream"}), 404, "job.missing")


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"colour": "red"}, "/colour"),
        ({"name": "No Spaces"}, "/name"),
        ({"training": {"ttt_steps": 0}}, "/training/ttt_steps"),
        ({"training": {"lr": float("nan")}}, "/training/lr"),
        ({"vocab": {"draft_vocab_size": -1}}, "/vocab/draft_vocab_size"),
        ({"extraction": {"aux_layers": [1, 2]}}, "/extraction"),
        ({"datasets": []}, "/datasets"),
    ],
)
@pytest.mark.parametrize("path", ["/jobs", "/jobs:plan"])
def test_a_job_that_does_not_validate_is_refused_with_its_field(api, document, change, pointer, path):
    body = json.dumps({**document(), **change})
    answer = api.http.post(path, content=body, headers={"Content-Type": "application/json"})
    problem = check(answer, 422, "request.invalid")
    assert problem["errors"][0]["pointer"].startswith(pointer)


@pytest.mark.parametrize("body", ["{", "[" * 100_000, "\xff", "9" * 5000, ""])
def test_what_is_not_json_is_refused(api, body):
    answer = api.http.post("/jobs", content=body.encode("latin-1"), headers={"Content-Type": "application/json"})
    check(answer, 400, "request.json")


@pytest.mark.parametrize(
    ("old", "new", "pointer"),
    [
        ('"name"', '"name": "x", "name"', "/name"),
        ('"uri"', '"uri": "/a/~b", "uri"', "/datasets/0/uri"),
        ('"name"', '"a/b": {"c": 1, "c": 2}, "name"', "/a~1b/c"),
        ('"name"', '"a": {"c": 1, "c": 2}, "a": 3, "name"', "/a"),
    ],
)
@pytest.mark.parametrize("path", ["/jobs", "/jobs:plan"])
def test_a_field_that_stands_twice_is_refused_and_named(api, document, path, old, new, pointer):
    job = {"name": "n", "datasets": document()["datasets"], **document()}
    body = json.dumps(job).replace(old, new, 1)
    answer = api.http.post(path, content=body, headers={"Content-Type": "application/json"})
    problem = check(answer, 400, "request.json")
    assert [fault["pointer"] for fault in problem["errors"]] == [pointer]
    assert "stands twice" in problem["detail"]


def test_a_name_with_half_a_character_is_refused(api, document):
    body = json.dumps(document()).replace("file:///data/train.jsonl", "\\ud800")
    answer = api.http.post("/jobs", content=body, headers={"Content-Type": "application/json"})
    check(answer, 422, "request.invalid")


def test_a_body_that_is_too_large_is_refused(make_api, document):
    api = make_api(max_body_bytes=2000)
    large = document(metadata={"x": "y" * 3000})
    check(api.http.post("/jobs", json=large), 413, "request.too_large")
    pieces = (b" " * 500 for _ in range(10))
    headers = {"Content-Type": "application/json"}
    check(api.http.post("/jobs", content=pieces, headers=headers), 413, "request.too_large")
    check(
        api.http.post("/jobs", content=b"{}", headers={**headers, "Content-Length": "9" * 30}), 413, "request.too_large"
    )
    check(api.http.post("/jobs", content=b"{}", headers={**headers, "Content-Length": "-1"}), 400, "request.length")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_does_not_call_itself_json_is_refused(api, kind):
    answer = api.http.post("/jobs", content=b"{}", headers={"Content-Type": kind})
    check(answer, 415, "request.media_type")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "localhost.evil", "10.0.0.1"]
)
def test_a_request_for_another_host_is_refused(api, host):
    check(api.http.get("/jobs", headers={"Host": host}), 421, "request.host")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1234", "LOCALHOST", "[::1]:80", "127.0.0.2"])
def test_this_machine_is_served_under_each_of_its_names(api, host):
    assert api.http.get("/jobs", headers={"Host": host}).status_code == 200


def test_a_proxy_may_be_named(make_api):
    api = make_api(allowed_hosts="aerie.example", keys_required=False)
    assert api.http.get("/jobs", headers={"Host": "aerie.example:443"}).status_code == 200


def test_a_page_of_another_site_changes_nothing(api):
    job = api.post()
    for origin in ("https://evil.example", "null"):
        answer = api.http.post(f"/jobs/{job['id']}/cancel", headers={"Origin": origin})
        check(answer, 403, "request.origin")
    assert api.http.post(f"/jobs/{job['id']}/cancel", headers={"Origin": "http://127.0.0.1:8000"}).status_code == 202


def test_sane_request_ids_are_kept_and_others_replaced(api):
    assert api.http.get("/healthz", headers={"X-Request-ID": "abc-1.2"}).headers["x-request-id"] == "abc-1.2"
    for odd in ("a b", "x" * 65, "a\tb", "<script>"):
        assert api.http.get("/healthz", headers={"X-Request-ID": odd}).headers["x-request-id"].startswith("req_")


def test_what_nobody_foresaw_is_logged_and_not_told(make_api, document, caplog):
    def burst(spec, roots):
        raise RuntimeError("the secret is swordfish")

    api = make_api(preflight=burst)
    with caplog.at_level(logging.ERROR):
        answer = api.http.post("/jobs", json=document(), headers={"Idempotency-Key": "k"})
    problem = check(answer, 500, "internal")
    assert "swordfish" not in answer.text
    assert problem["request_id"] in caplog.text
    assert "the secret is swordfish" in caplog.text
    assert api.http.get("/jobs").json()["data"] == []


def test_nobody_writes_lines_into_the_access_log(api, caplog):
    with caplog.at_level(logging.INFO, "aerie_api.access"):
        api.http.get("/jobs%0aforged%20line")
    assert [r.getMessage().count("\n") for r in caplog.records if r.name == "aerie_api.access"] == [0]
    assert "\\n" in caplog.text


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
def test_an_unusable_idempotency_key_is_refused(api, document, key):
    check(api.http.post("/jobs", json=document(), headers={"Idempotency-Key": key}), 400, "idempotency.key")


def test_answers_are_not_kept_by_caches_nor_guessed_at(api):
    answer = api.http.get("/jobs")
    assert (answer.headers["cache-control"], answer.headers["x-content-type-options"]) == ("no-store", "nosniff")


def test_the_bare_address_says_what_this_is_and_where_to_go_on(api):
    front = api.http.get("/").json()
    assert (front.pop("service"), front.pop("version")) == ("aerie", api.app.version)
    assert {api.http.get(address).status_code for address in front.values()} == {200}


def test_the_house_says_whether_it_can_work(api):
    assert api.http.get("/healthz").json() == {"status": "ok"}
    assert api.http.get("/readyz").json()["store_free_bytes"] > 0


def test_the_house_says_when_its_reaper_does_not_work(api):
    api.house.watched = True
    api.house.reaper.failing = "disk full"
    assert "disk full" in check(api.http.get("/readyz"), 503, "api.not_ready")["detail"]


def test_the_document_says_that_every_error_is_a_problem(api):
    schema = api.http.get("/openapi.json").json()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert "application/problem+json" in operation["responses"]["default"]["content"], (method, path)
            assert "422" not in operation["responses"]
    assert {"JobSpec", "Problem", "Job", "Assignment"} <= set(schema["components"]["schemas"])
    assert schema["paths"]["/jobs"]["post"]["requestBody"]["required"] is True
    text = json.dumps(schema)
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= set(schema["components"]["schemas"])


def test_the_codes_of_the_api_are_its_own():
    ours = [kind for kind in error_types() if kind.__module__.startswith("aerie_api")]

    assert len({kind.code for kind in ours}) == len(ours) > 2
