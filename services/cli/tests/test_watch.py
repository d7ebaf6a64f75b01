"""Following a job to its end: what is shown, what is asked, and an API that goes away meanwhile."""

import json

import httpx
import pytest

from aerie_cli import watch
from aerie_cli.client import Api
from aerie_cli.exits import NotReachable, status_of_job
from aerie_cli.watch import Follower, Lines


def stage(name, state, percent, **more):
    return {"name": name, "state": state, "progress_percentage": percent, **more}


def job(status, *stages, **more):
    return {"object": "job", "id": "job_1", "name": "tiny", "status": status, "stages": list(stages), **more}


class Script:
    """An API whose answers are listed; an exception among them is an API that is away."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.tags = []
        self.losses = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/metrics"):
            return httpx.Response(200, json={"object": "list", "data": self.losses, "has_more": False})
        self.tags.append(request.headers.get("If-None-Match"))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            return httpx.Response(304)
        return httpx.Response(200, json=answer, headers={"ETag": f'"{len(self.tags)}"'})


def follow(script: Script) -> tuple[dict, list[str]]:
    """The finished job and what was said on the way."""
    said: list[str] = []
    with Api("http://aerie", httpx.MockTransport(script)) as api:
        finished = Follower(api, "job_1", wait=lambda _: None).run(Lines(said.append))
    return finished, said


def test_a_line_is_said_when_a_stage_starts_moves_or_ends():
    _, said = follow(
        Script(
            job("queued", stage("prepare", "pending", 0)),
            job("running", stage("prepare", "running", 3, note="reading")),
            job("running", stage("prepare", "running", 8, note="reading")),
            job("running", stage("prepare", "running", 55, note="reading", estimated_remaining_seconds=90)),
            job("succeeded", stage("prepare", "succeeded", 100, seconds=4.2)),
        )
    )

    assert said == [
        "prepare   running     3 %  reading",
        "prepare   running    55 %  -1:30  reading",
        "prepare   succeeded 100 %  4.2 s",
    ]


def test_reused_units_are_said_and_states_that_generate_kept_are_not_called_so():
    three = {"done": 3, "total": 3}
    _, said = follow(
        Script(
            job(
                "succeeded",
                stage("generate", "succeeded", 100, reused_units=2, shards=three, reused_from=["job_0"]),
                stage("extract", "succeeded", 100, reused=True, reused_units=3, shards=three, reused_from=["job_1"]),
            )
        )
    )

    assert said == [
        "generate  succeeded 100 %  2 of 3 units reused",
        "extract   succeeded 100 %  kept from generate",
    ]


def test_the_newest_loss_stands_beside_training():
    script = Script(job("running", stage("train", "running", 50)), job("succeeded", stage("train", "succeeded", 100)))
    script.losses = [{"value": 2.5, "step": 1}, {"value": 1.25, "step": 2}]

    _, said = follow(script)

    assert said[0] == "train     running    50 %  loss 1.250"


def test_what_did_not_change_is_not_sent_again():
    script = Script(job("running", stage("prepare", "running", 1)), None, job("succeeded"))

    finished, _ = follow(script)

    assert finished["status"] == "succeeded"
    assert script.tags == [None, '"1"', '"1"']


def test_an_api_that_is_restarted_is_waited_for():
    away = httpx.ConnectError("refused")

    finished, _ = follow(Script(job("running", stage("train", "pending", 0)), away, away, job("succeeded")))

    assert finished["status"] == "succeeded"


def test_an_api_that_stays_away_ends_the_watch(monkeypatch):
    monkeypatch.setattr(watch, "AWAY_S", -1.0)

    with pytest.raises(NotReachable):
        follow(Script(httpx.ConnectError("refused")))


@pytest.mark.parametrize(
    ("finished", "status"),
    [
        (job("succeeded", verdict="pass"), 0),
        (job("succeeded", verdict="fail"), 3),
        (job("failed", verdict=None), 1),
        (job("cancelled", verdict=None), 1),
    ],
)
def test_the_exit_status_tells_how_a_job_ended(finished, status):
    assert status_of_job(finished) == status


def test_bars_show_every_stage(capsys):
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    with watch.Bars(Console(file=out, width=120, force_terminal=True)) as bars:
        bars.show(job("running", stage("prepare", "succeeded", 100, seconds=2), stage("train", "running", 50)), 1.5)

    assert "prepare" in out.getvalue()
    assert "loss 1.500" in out.getvalue()
    assert json.dumps(out.getvalue()).count("50 %") >= 1
