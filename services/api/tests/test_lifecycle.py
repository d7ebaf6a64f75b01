"""A job from its post to its drafter, and what people read of it on the way."""

from __future__ import annotations

import threading

import pytest

from eagle3_core.errors import InvalidRequest
from eagle3_core.objects.keys import Training
from eagle3_core.objects.protocol import ObjectDamaged


def test_a_job_runs_through_every_stage_and_leaves_a_drafter(api, all_stages):
    job = api.post()
    ran = api.worker().run()

    done = api.job(job["id"])
    assert list(dict.fromkeys(ran)) == all_stages
    assert ran.count("generate") == ran.count("extract") == ran.count("evaluate") == 2
    assert done["status"] == "succeeded"
    assert [s["state"] for s in done["stages"]] == ["succeeded"] * 8
    assert done["acceptance_length"]["mean"] == 2.1
    assert (done["verdict"], done["lossless"], done["prompts"]) == ("pass", True, 4)
    assert done["drafter"] == {"name": "fox", "digest": "d" * 64}
    drafters = api.http.get("/drafters").json()["data"]
    assert [(d["name"], d["job"], d["verdict"]) for d in drafters] == [("fox", job["id"], "pass")]


def test_what_the_engine_delivered_stands_beside_what_was_promised(api, monkeypatch):
    served = api.results["package"]["report"]["acceptance_length"] | {"mean": 2.05}
    serving = {
        "engine": "SGLang 0.5.23", "device": "cuda", "dtype": "bfloat16", "drafter": "e" * 64, "exact": False,
        "verify_calls": 40, "prompts_counted_otherwise": 1, "gap": 0.0238, "lossless": True, "near_tie_share": 0.25,
        "calls_by_right_drafts": [10, 20, 10],
        "speedup": [{"in_flight": 1, "plain_tokens_per_s": 100.0, "drafted_tokens_per_s": 170.0, "factor": 1.7}],
    }  # fmt: skip
    report = api.results["package"]["report"] | {"acceptance_length_served": served, "serving": serving}
    monkeypatch.setitem(api.results, "package", {"digest": "d" * 64, "report": report})
    job = api.post()
    api.worker().run()

    done = api.job(job["id"])
    assert (done["acceptance_length"]["mean"], done["acceptance_length_served"]["mean"]) == (2.1, 2.05)
    assert done["serving"] == serving
    (drafter,) = api.http.get("/drafters").json()["data"]
    assert drafter["acceptance_length_served"]["mean"] == 2.05


def test_posting_answers_202_with_place_and_pause(api, document):
    answer = api.http.post("/jobs", json=document())
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/jobs/{answer.json()['id']}"
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["warnings"] == ["looks small"]
    assert answer.json()["status"] == "queued"


def test_the_versioned_address_is_the_same_router(api, document):
    answer = api.http.post("/v1/jobs", json=document())
    assert answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
    assert api.http.get(answer.headers["location"]).json()["id"] == answer.json()["id"]


def test_a_plan_says_what_would_run_and_stores_nothing(api, document, all_stages):
    plan = api.http.post("/jobs:plan", json=document()).json()
    assert [s["name"] for s in plan["stages"]] == all_stages
    assert plan["stages"][0]["units"] == 1
    assert plan["stages"][2]["units"] is None
    assert plan["spec"]["training"]["ttt_steps"] == 3
    assert api.http.get("/jobs").json()["data"] == []


def test_a_plan_knows_what_earlier_jobs_made(api, document):
    api.post()
    api.worker().run(also=True)
    plan = api.http.post("/jobs:plan", json=document("hen", training={"epochs": 9})).json()
    known = {s["name"]: (s["units"], s["reused_units"]) for s in plan["stages"]}
    assert known["generate"] == known["extract"] == (2, 2)
    assert known["train"] == (1, 0)
    assert known["evaluate"] == (2, None)


def test_an_assignment_carries_what_its_key_is_made_of(api):
    api.post()
    worker, unit = api.reach("extract")
    worker.commit(unit)
    second = worker.take()
    assert {k: len(v) for k, v in second.inputs.items()} == {"generate": 1}
    assert set(second.results) == {"prepare", "canary", "generate"}
    worker.commit(second)
    _, train = api.reach("train")
    assert {k: len(v) for k, v in train.inputs.items()} == {"extract": 2, "vocab": 1}
    assert second.sources["verifier"] == "v" * 64


def test_without_regeneration_extract_reads_prepare(api, document):
    api.post(document(data={"unit_samples": 2, "regenerate": {"enabled": False}}))
    _, unit = api.reach("extract")
    assert {k: len(v) for k, v in unit.inputs.items()} == {"prepare": 1}


def test_a_job_says_why_it_waits(api, document):
    first, second = api.post(), api.post(document("hen"))
    assert "no worker is there yet" in api.job(first["id"])["why_queued"]
    assert api.worker("w2").claim(queues=["train"]) is None
    assert "no worker serves queue 'prep'" in api.job(first["id"])["why_queued"]
    api.worker().take()
    assert api.job(first["id"])["why_queued"] is None
    assert api.job(second["id"])["why_queued"] == "1 job of this tenant first"


def test_logs_and_metrics_can_be_followed(api):
    job = api.post()
    worker, unit = api.reach("train")
    lines = [{"at": 1.0, "text": f"line {i}"} for i in range(5)]
    metrics = [{"name": "loss", "value": 3.0 - i, "step": i} for i in range(3)]
    worker.beat(unit, logs=lines, metrics=[*metrics, {"name": "lr", "value": 1e-4, "step": 0}])
    place = f"/jobs/{job['id']}"
    tail = api.http.get(f"{place}/logs?tail=2&stage=train").json()
    assert [e["text"] for e in tail["data"]] == ["line 3", "line 4"]
    page = api.http.get(f"{place}/logs?limit=2").json()
    assert (page["has_more"], page["last_seq"]) == (True, 2)
    assert [e["text"] for e in api.http.get(f"{place}/logs?after=4").json()["data"]] == ["line 4"]
    curve = api.http.get(f"{place}/metrics?name=loss&since_step=0").json()["data"]
    assert [(p["step"], p["value"]) for p in curve] == [(1, 2.0), (2, 1.0)]


def test_a_resumed_attempt_measures_a_step_again_and_the_new_value_counts(api):
    job = api.post()
    worker, unit = api.reach("train")
    worker.beat(unit, metrics=[{"name": "loss", "value": 3.0, "step": 1}, {"name": "loss", "value": 2.5, "step": 1}])
    worker.beat(unit, metrics=[{"name": "loss", "value": 2.0, "step": 1}])
    assert [p["value"] for p in api.http.get(f"/jobs/{job['id']}/metrics").json()["data"]] == [2.0]


def test_a_loss_that_is_not_a_number_is_kept_as_null(api):
    job = api.post()
    worker, unit = api.reach("train")
    body = '{"metrics": [{"name": "loss", "value": NaN, "step": 1}]}'
    assert worker.tell(unit, "heartbeat", body).status_code == 200
    assert [p["value"] for p in api.http.get(f"/jobs/{job['id']}/metrics").json()["data"]] == [None]


def test_a_flood_of_lines_is_cut_and_said(api):
    job = api.post()
    worker, unit = api.reach("prepare")
    worker.beat(unit, logs=[{"at": 1.0, "text": "x" * 9000}] * 1500)
    rows = api.http.get(f"/jobs/{job['id']}/logs?limit=10000").json()["data"]
    assert len(rows) == 1001
    assert rows[0]["text"].startswith("500 lines left out")
    assert max(len(r["text"]) for r in rows) == 4096


def test_artifacts_are_listed_and_read_by_manifest_only(api):
    job = api.post()
    place = f"/jobs/{job['id']}/artifacts"
    assert api.http.get(place).json()["data"] == []
    api.worker().run()
    listed = {a["name"]: a for a in api.http.get(place).json()["data"]}
    assert set(listed) == {"out.bin", "sglang/config.json"}
    got = api.http.get(listed["sglang/config.json"]["href"])
    assert (got.content, got.headers["x-content-blake3"]) == (b"{}", listed["sglang/config.json"]["blake3"])
    for odd in ("../data/aerie.db", "%2e%2e/%2e%2e/data/aerie.db", "sglang", "nope"):
        answer = api.http.get(f"{place}/{odd}")
        assert answer.status_code == 404
        assert answer.json()["code"] in ("artifact.missing", "request.not_found")


def test_checkpoints_are_listed_once_they_are_whole_newest_first_with_their_figures(api):
    job = api.post()
    place = f"/jobs/{job['id']}/checkpoints"
    assert api.http.get(place).json()["data"] == [], "not trained yet"
    worker, unit = api.reach("train")
    prefix = Training(unit.tenant, unit.key).prefix
    for step, whole in ((2, True), (10, True), (12, False)):
        stem = f"{prefix}{step:08d}-{unit.fence:06d}"
        api.store.put_bytes(f"{stem}-{'a' * 16}-state.safetensors", b"x" * step)
        if whole:
            api.store.put_bytes(f"{stem}-complete.json", b"{}")
    worker.beat(unit, metrics=[{"name": "loss", "value": 100.0 - step, "step": step} for step in (2, 9, 10)])

    found = api.http.get(place).json()["data"]
    assert [(one["step_number"], one["size"], one["metrics"]) for one in found] == [
        (10, 10, {"loss": 90.0}), (2, 2, {"loss": 98.0}),
    ]  # fmt: skip
    assert {one["fence"] for one in found} == {unit.fence}


def test_a_damaged_artifact_is_never_served_whole(api):
    job = api.post()
    api.worker().run()
    entry, _ = api.house.artifacts.open("default", job["id"], "out.bin")
    path = api.folder / "objects" / entry.key
    path.write_bytes(b"!" * entry.size)
    _, pieces = api.house.artifacts.open("default", job["id"], "out.bin")
    with pytest.raises(ObjectDamaged, match="hashes to"):
        next(pieces)
    path.write_bytes(b"short")
    assert api.http.get(f"/jobs/{job['id']}/artifacts/out.bin").json()["code"] == "object.damaged"


def test_the_document_of_an_ended_job_is_kept_until_it_is_taken_up_again_or_deleted(api, monkeypatch):
    job = api.post()
    api.http.post(f"/jobs/{job['id']}/cancel")
    place = f"/jobs/{job['id']}"
    first = api.http.get(place)
    with monkeypatch.context() as once:
        once.setattr("aerie_api.jobs.service.documents", None)  # whoever gathers it anew stumbles
        again = api.http.get(place)
    assert (again.content, again.headers["etag"]) == (first.content, first.headers["etag"])

    api.http.post(f"{place}/retry")
    assert api.http.get(place).json()["status"] == "queued"
    api.http.post(f"{place}/cancel")
    assert api.http.get(place).headers["etag"] != first.headers["etag"]
    assert api.http.delete(place).status_code == 204
    assert api.http.get(place).status_code == 404


def test_the_tag_of_a_job_changes_with_it_and_only_then(api):
    job = api.post()
    worker, unit = api.reach("prepare")
    first = api.http.get(f"/jobs/{job['id']}")
    tag = first.headers["etag"]
    api.clock.pass_(1)
    again = api.http.get(f"/jobs/{job['id']}", headers={"If-None-Match": tag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    worker.beat(unit, progress={"done": 1, "total": 2})
    changed = api.http.get(f"/jobs/{job['id']}", headers={"If-None-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ('"a", {tag}', 304),
        ("W/{tag}", 304),
        ('"a,b" ,W/"c",{tag}', 304),
        ("*", 304),
        ('"a", "b"', 200),
        ("", 200),
        (",,", 200),
    ],
)
def test_a_tag_is_found_in_a_list_of_them(api, asked, status):
    place = f"/jobs/{api.post()['id']}"
    tag = api.http.get(place).headers["etag"]

    answer = api.http.get(place, headers={"If-None-Match": asked.format(tag=tag)})

    assert (answer.status_code, answer.headers["etag"], bool(answer.content)) == (status, tag, status == 200)


def test_pages_of_jobs_follow_their_cursor(api, document):
    ids = [api.post(document(f"fox{i}"))["id"] for i in range(5)]
    first = api.http.get("/jobs?limit=2").json()
    assert [j["id"] for j in first["data"]] == [ids[4], ids[3]]
    assert (first["object"], first["has_more"], first["first_id"], first["last_id"]) == ("list", True, ids[4], ids[3])
    last = api.http.get(f"/jobs?limit=3&after={first['last_id']}").json()
    assert [j["id"] for j in last["data"]] == ids[2::-1]
    assert last["has_more"] is False
    api.http.post(f"/jobs/{ids[0]}/cancel")
    assert [j["id"] for j in api.http.get("/jobs?status=cancelled").json()["data"]] == [ids[0]]
    assert api.http.get("/jobs?after=job_none").json()["code"] == "job.missing"


def test_events_stream_until_the_job_ends_and_go_on_where_the_reader_stopped(api):
    job = api.post()
    lines: list[str] = []
    reading = threading.Event()

    def read() -> None:
        with api.http.stream("GET", f"/jobs/{job['id']}/events", headers={"Accept": "text/event-stream"}) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            reading.set()
            lines.extend(stream.iter_lines())

    reader = threading.Thread(target=read)
    reader.start()
    api.worker().run()
    reader.join(timeout=30)
    assert not reader.is_alive()
    numbers = [int(line[4:]) for line in lines if line.startswith("id: ")]
    assert numbers == list(range(1, len(api.events(job["id"])) + 1))
    assert "event: job.succeeded" in lines
    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(numbers[-2])}
    rest = api.http.get(f"/jobs/{job['id']}/events", headers=headers).text
    assert [line for line in rest.splitlines() if line.startswith("id: ")] == [f"id: {numbers[-1]}"]
    headers["Last-Event-ID"] = str(numbers[-1])
    assert api.http.get(f"/jobs/{job['id']}/events", headers=headers).status_code == 204


def test_a_waiting_worker_is_woken_by_a_new_job(api):
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(api.worker().claim(wait_s=60)))
    waiting.start()
    api.post()
    waiting.join(timeout=30)
    assert [unit.stage for unit in found] == ["prepare"]


def test_what_preflight_refuses_is_refused_before_anything_is_stored(make_api, document):
    def refuse(spec, roots):
        raise InvalidRequest("no such folder", pointer="/verifier/model")

    api = make_api(preflight=refuse)
    answer = api.http.post("/jobs", json=document())
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/verifier/model")
    assert api.http.get("/jobs").json()["data"] == []


def test_a_name_is_free_again_after_a_failure_but_not_after_success(api, document):
    first = api.post()
    taken = api.http.post("/jobs", json=document())
    assert (taken.status_code, taken.json()["code"]) == (409, "drafter.name_in_use")
    api.http.post(f"/jobs/{first['id']}/cancel")
    second = api.post()
    api.worker().run()
    assert api.job(second["id"])["status"] == "succeeded"
    taken = api.http.post("/jobs", json=document())
    assert (taken.status_code, taken.json()["code"]) == (409, "drafter.name_in_use")
    retried = api.http.post(f"/jobs/{first['id']}/retry")
    assert retried.json()["code"] == "drafter.name_in_use"


def test_results_that_say_too_little_fail_the_job_by_name(make_api):
    def forgetful(stage, spec, results):
        return {} if stage == "prepare" else results[0]

    api = make_api(reduce=forgetful)
    job = api.post()
    api.worker().run()
    failed = api.job(job["id"])
    assert (failed["status"], failed["reason"]["code"]) == ("failed", "stage.result")
    assert "samples" in failed["reason"]["detail"]


def test_a_job_shows_the_furthest_value_of_every_curve_of_its_stages(api):
    job = api.post()
    worker, unit = api.reach("train")
    loss = [{"name": "loss", "value": 3.0 - i, "step": i} for i in range(3)]
    worker.beat(unit, metrics=[*loss, {"name": "tokens_per_s", "value": 250.0, "step": 1}])
    worker.beat(unit, metrics=[{"name": "loss", "value": 2.25, "step": 1}])  # a resumed attempt measures again

    shown = api.stage(job["id"], "train")["metrics"]

    assert shown == [{"name": "loss", "step": 2, "value": 1.0}, {"name": "tokens_per_s", "step": 1, "value": 250.0}]
    assert api.stage(job["id"], "prepare")["metrics"] == []
    (listed,) = api.http.get("/jobs").json()["data"]
    assert {stage["metrics"] for stage in listed["stages"]} == {None}


def test_of_units_that_came_as_far_the_newest_value_stands_for_the_curve(make_api):
    api = make_api()
    job = api.post()
    worker, first = api.reach("generate")
    second = worker.take()
    for unit, value in ((second, 5.0), (first, 7.0)):
        worker.beat(unit, metrics=[{"name": "tokens_per_s", "value": value, "step": 4}])
        api.clock.now += 1

    assert api.stage(job["id"], "generate")["metrics"] == [{"name": "tokens_per_s", "step": 4, "value": 7.0}]


def test_a_change_of_a_curve_changes_the_jobs_tag(api):
    job = api.post()
    worker, unit = api.reach("train")
    place = f"/jobs/{job['id']}"
    tag = api.http.get(place).headers["ETag"]

    worker.beat(unit, metrics=[{"name": "loss", "value": 1.0, "step": 1}])

    assert api.http.get(place, headers={"If-None-Match": tag}).status_code == 200
