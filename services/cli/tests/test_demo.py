"""The demo's own parts: the job it makes, the name it finds, what it downloads, the report it writes."""

import json
import sys
from contextlib import nullcontext

import httpx
import pytest
from typer.testing import CliRunner

from aerie_cli import demo, demo_report
from aerie_cli.client import Api
from aerie_cli.main import app


class Store:
    """An API that has some names in use."""

    def __init__(self, names):
        self.names = set(names)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        job = json.loads(request.content)
        if job["name"] in self.names:
            problem = {"code": "drafter.name_in_use", "status": 409, "detail": "in use"}
            return httpx.Response(409, json=problem)
        return httpx.Response(202, json={"object": "job", "id": "job_1", "name": job["name"]})


def api(store: Store) -> Api:
    return Api("http://aerie", httpx.MockTransport(store))


def test_ctrl_c_cancels_the_demos_job_so_that_the_next_one_does_not_find_it_going_on(capsys):
    asked = []

    def interrupted(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path))
        if request.method == "GET":
            raise KeyboardInterrupt
        return httpx.Response(202, json={"object": "job", "id": "job_1", "name": "demo", "status": "cancelling"})

    with Api("http://aerie", httpx.MockTransport(interrupted)) as client, pytest.raises(KeyboardInterrupt):
        demo.follow_or_cancel(client, "job_1")

    assert asked == [("GET", "/jobs/job_1"), ("POST", "/jobs/job_1/cancel")]
    assert "cancelling job_1" in capsys.readouterr().err


def test_a_name_in_use_gets_the_next_free_number():
    with api(Store(names=["smollm2-demo", "smollm2-demo-2"])) as client:
        posted = demo.post(client, {"name": "smollm2-demo"})

    assert posted["name"] == "smollm2-demo-3"


@pytest.mark.parametrize(("verdict", "status"), [("pass", 0), ("fail", 3)])
def test_the_verdict_is_the_demos_exit_status_and_what_was_reused_is_said(tmp_path, monkeypatch, verdict, status):
    reused = {"name": "generate", "state": "succeeded", "progress_percentage": 100, "reused": True, "reused_units": 4}
    ended = {
        "object": "job", "id": "job_2", "name": "smollm2-demo", "status": "succeeded", "verdict": verdict,
        "stages": [{**reused, "reused_from": ["job_1"]}],
    }  # fmt: skip

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(202 if request.method == "POST" else 200, json=ended)

    drafter = {"digest": "d", "sglang_dir": "/s", "speculators_dir": "/p"}
    monkeypatch.setattr(demo, "make_job", lambda *_: {"name": "smollm2-demo"})
    monkeypatch.setattr(demo, "house", lambda *_: nullcontext("http://aerie"))
    monkeypatch.setattr(demo, "Api", lambda url, **_: Api(url, httpx.MockTransport(answer)))
    monkeypatch.setattr(demo, "fetch", lambda *_: drafter)

    told = CliRunner().invoke(app, ["demo", "--dir", str(tmp_path), "--json"])

    assert told.exit_code == status, told.output
    assert json.loads(told.stdout)["verdict"] == verdict
    assert json.loads((tmp_path / "demo/report.json").read_text()) == json.loads(told.stdout)
    assert "reused from earlier jobs, not run again: generate" in told.stderr


def test_places_are_filled_in_wherever_they_stand():
    filled = demo.fill({"a": ["${TRAIN}", {"b": "file:${TEST}"}], "c": 3}, {"TRAIN": "/x", "TEST": "/y"})

    assert filled == {"a": ["/x", {"b": "file:/y"}], "c": 3}


def test_the_report_has_the_figures_of_the_job_and_says_what_was_reused():
    job = {
        "id": "job_1", "name": "smollm2-demo", "status": "succeeded", "verdict": "pass", "acceptance_length": {"mean": 2.1},
        "acceptance_by_position": [0.6, 0.5, 0.4], "lossless": True, "looping_share": 0.1, "seen_ngram_share": 0.4,
        "prompts": 70, "reason": None,
        "stages": [
            {"name": "generate", "seconds": None, "reused": True, "reused_units": 3, "reused_from": ["job_0"]},
            {"name": "train", "seconds": 12.5, "reused": False, "reused_units": 0},
        ],
    }  # fmt: skip

    report = demo_report.make_report(job, {"digest": "d", "sglang_dir": "/s", "speculators_dir": "/p"}, 61.24)

    assert report["acceptance_length"] == {"mean": 2.1}
    assert report["stages"][0] == {
        "name": "generate", "seconds": 0.0, "reused": True, "reused_units": 3, "from_earlier_jobs": True,
    }  # fmt: skip
    assert (report["seconds"], report["prompts"], report["drafter"]["digest"]) == (61.2, 70, "d")


def test_the_report_of_an_earlier_demo_is_kept_under_its_jobs_id_and_said(tmp_path, capsys):
    place = tmp_path / "report.json"
    place.write_text(json.dumps({"job_id": "job_1", "verdict": "pass"}))

    demo_report.keep_earlier(place, "job_2")

    assert json.loads((tmp_path / "report-job_1.json").read_text())["verdict"] == "pass"
    assert not place.exists()
    assert "aerie download job_1" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job_id": "../../etc"}', '{"job_id": 7}', '{"job_id": "job_2"}'])
def test_a_report_that_is_no_other_jobs_is_simply_replaced(tmp_path, text):
    place = tmp_path / "report.json"
    place.write_text(text)

    demo_report.keep_earlier(place, "job_2")

    assert list(tmp_path.iterdir()) == [place]


def test_the_demo_ends_with_where_everything_is(tmp_path):
    drafter = {"sglang_dir": "/d/sglang", "speculators_dir": "/d/speculators"}

    said = list(demo_report.whereabouts(tmp_path / "report.json", {"drafter": drafter, "seconds": 61.2}))

    assert said == [
        "drafter /d/sglang (SGLang), /d/speculators (speculators, vLLM)",
        "card    /d/card.md: what it is worth, and how to serve it",
        f"report  {tmp_path / 'report.json'}, 1:01 in all",
    ]


def test_a_script_that_fails_ends_the_demo_with_its_name(tmp_path):
    (tmp_path / "verifier.py").write_text("raise SystemExit(7)")

    with pytest.raises(demo.ExampleFailed, match=r"verifier\.py ended with exit status 7"):
        demo.make_job(tmp_path / "job.json", tmp_path, [])


def test_outside_a_checkout_the_demo_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "demo.py"))

    with pytest.raises(demo.NoCheckout) as refused:
        demo.checkout()

    assert "aerie submit" in refused.value.remedy


def test_a_demo_on_sglang_where_there_is_none_ends_before_anything_is_made(monkeypatch, tmp_path):
    monkeypatch.setenv("AERIE_SGLANG_PYTHON", sys.executable)  # asked for real: it has none
    monkeypatch.chdir(tmp_path)

    ended = CliRunner().invoke(app, ["demo", "--backend", "sglang"])

    assert ended.exit_code != 0
    assert "has no SGLang" in ended.output
    assert "make setup-sglang" in ended.output
    assert list(tmp_path.iterdir()) == []
