"""Following a job to its end: what is shown, what is asked, and an API that goes away meanwhile."""

from io import StringIO

import httpx
import pytest
from rich.console import Console

from aerie_cli import watch
from aerie_cli.client import Api
from aerie_cli.exits import status_of_job
from aerie_cli.watch import Follower, Lines
from eagle3_core.jobs.refusals import Unreachable


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
        "prepare   running    55 %  1:30 left  reading",
        "prepare   succeeded 100 %  4.2 s",
    ]


def test_a_log_gets_a_line_when_the_note_has_other_words_and_once_a_minute_while_a_stage_moves():
    said: list[str] = []
    now = [0.0]
    lines = Lines(said.append, lambda: now[0])
    for at, percent, note in ((0, 1, "0.4 tokens/s"), (30, 2, "7 tokens/s"), (31, 2, "checking"), (90, 2, "checking"),
                              (91, 3, "checking"), (200, 3, "checking")):  # fmt: skip
        now[0] = at
        lines.show(
            job("running", stage("generate", "running", percent, note=note, rate=0.42, rate_unit="samples")), None
        )

    assert said == [
        "generate  running     1 %  0.4 samples/s, 0.4 tokens/s",
        "generate  running     2 %  0.4 samples/s, checking",
        "generate  running     3 %  0.4 samples/s, checking",
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

    with pytest.raises(Unreachable):
        follow(Script(job("running"), httpx.ConnectError("refused")))


def test_an_api_that_never_answered_is_not_waited_for():
    script = Script(httpx.ConnectError("refused"), job("succeeded"))

    with pytest.raises(Unreachable):
        follow(script)
    assert len(script.answers) == 1


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_an_api_that_cannot_answer_now_is_waited_for(status):
    answers = [
        httpx.Response(200, json=job("running")),
        httpx.Response(status, text="busy"),
        httpx.Response(200, json=job("failed")),
    ]
    if status == 429:
        answers[1] = httpx.Response(429, json={"code": "request.rate", "status": 429, "detail": "slow down"})

    with Api("http://aerie", httpx.MockTransport(lambda _: answers.pop(0))) as api:
        assert Follower(api, "job_1", wait=lambda _: None).run(Lines(lambda _: None))["status"] == "failed"


def test_what_a_job_waits_for_is_said_once():
    waits = job("queued", stage("prepare", "queued", 0), why_queued="no worker\x1b[2J serves 'prep'")

    _, said = follow(Script(waits, waits, job("running", stage("prepare", "running", 0)), waits, job("cancelled")))

    assert said == [
        r"waits: no worker\x1b[2J serves 'prep'",
        "prepare   running     0 %",
        r"waits: no worker\x1b[2J serves 'prep'",
    ]


def test_a_job_of_a_kind_that_is_not_known_yet_is_followed():
    _, said = follow(
        Script(job("paused", stage("train", "paused", 40)), job("failed", stage("train", "new-state", 40)))
    )

    assert said == ["train     paused     40 %", "train     new-state  40 %"]


def test_a_log_is_followed_over_a_restart_to_the_jobs_end(monkeypatch, capsys):
    monkeypatch.setattr(watch.time, "sleep", lambda _: None)
    line = {"stage": "train", "unit": 0, "attempt": 1, "level": "info", "at": 1e300}
    pages = [[{**line, "seq": 1, "text": "one"}], [], [{**line, "seq": 2, "text": "\x1b]0;two\x07 [bold]"}], []]
    jobs = [job("running"), httpx.ConnectError("away"), job("running"), job("succeeded"), job("succeeded")]
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/logs"):
            asked.append(request.url.params.get("after"))
            data = pages.pop(0) if pages else []
            last = data[-1]["seq"] if data else 0
            return httpx.Response(200, json={"object": "list", "data": data, "has_more": False, "last_seq": last})
        told = jobs.pop(0)
        if isinstance(told, Exception):
            raise told
        return httpx.Response(200, json=told)

    real = httpx.Client
    with_answer = lambda **more: real(**{**more, "transport": httpx.MockTransport(answer)})  # noqa: E731
    monkeypatch.setattr("aerie_cli.client.httpx.Client", with_answer)
    from typer.testing import CliRunner

    from aerie_cli.main import app

    told = CliRunner().invoke(app, ["logs", "job_1", "--follow", "--url", "http://aerie"]).stdout

    assert [text.split("/0 ")[1] for text in told.splitlines()] == ["one", r"\x1b]0;two\x07 [bold]"]
    assert told.startswith("--:--:--")
    assert asked == [None, "1", "1", "2"]


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


@pytest.mark.parametrize(("verdict", "status"), [("pass", 0), ("fail", 3)])
def test_a_drafter_that_did_not_pass_ends_the_command_with_a_status_of_its_own(monkeypatch, verdict, status):
    ended = job("succeeded", stage("package", "succeeded", 100), verdict=verdict, reasons=["below 2.0"])
    real, answer = httpx.Client, lambda _: httpx.Response(200, json=ended)
    monkeypatch.setattr(
        "aerie_cli.client.httpx.Client", lambda **more: real(**{**more, "transport": httpx.MockTransport(answer)})
    )
    from typer.testing import CliRunner

    from aerie_cli.main import app

    told = CliRunner().invoke(app, ["watch", "job_1", "--url", "http://aerie"])

    assert told.exit_code == status, told.output


def bars(width: int, **more) -> list[str]:
    """The lines of the bars of a half trained job on a terminal of `width` columns."""
    console = Console(width=width, record=True, file=StringIO(), force_terminal=True)
    train = stage(
        "train",
        "running",
        50,
        seconds=61,
        estimated_remaining_seconds=3725,
        note="a long note " * 9,
        rate=2,
        rate_unit="steps",
    )
    with watch.Bars(console) as shown:
        console.export_text(clear=True)
        shown.show(job("running", stage("prepare", "succeeded", 100, seconds=2), train, **more), 1.5)
        text = console.export_text()
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("width", [40, 72, 80, 120])
def test_bars_show_every_stage_whole_on_a_terminal_of_any_width(width):
    prepare, train, *_ = bars(width)

    assert prepare.startswith("✓ prepare   ━━━━━━")
    assert "100 %" in prepare
    assert train.startswith("> train     ━━━")
    assert " 50 %" in train
    assert "1:02:05 left" in train
    assert len(train) <= width
    assert ("2.0 steps/s" in train) == (width >= 72)


def test_below_the_bars_stands_when_all_will_be_done_or_what_is_waited_for(monkeypatch):
    monkeypatch.setattr(watch.time, "time", lambda: 1000.0)

    assert bars(80, estimated_finish=1125.0)[2] == "done in about 2:05"
    assert bars(80, why_queued="no worker", estimated_finish=1125.0)[2] == "waits: no worker"
    assert bars(80)[2:] == []
