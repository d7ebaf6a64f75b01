"""A measured job on a terminal: what was promised and, where an engine served, what was delivered."""

import time
from typing import Any

import httpx
from rich.console import Console
from typer.testing import CliRunner

from aerie_cli.client import Api
from aerie_cli.main import app
from aerie_cli.report import clock, figures_table

LENGTH = {
    "mean": 2.1, "macro": 2.0, "ci_low": 1.9, "ci_high": 2.3,
    "by_task": {"math": {"mean": 2.1, "ci_low": 1.9, "ci_high": 2.3, "prompts": 4}},
}  # fmt: skip
SERVING = {
    "engine": "SGLang 0.5.23", "device": "cpu", "dtype": "float32", "prompts_counted_otherwise": 0, "lossless": True,
    "speedup": [{"in_flight": 4, "plain_tokens_per_s": 40.0, "drafted_tokens_per_s": 52.0, "factor": 1.3}],
}  # fmt: skip


def shown(**more: Any) -> str:
    """The figures as a person sees them."""
    console = Console(width=160, record=True, file=None, color_system=None)
    job = {"acceptance_length": LENGTH, "prompts": 4, "lossless": True, "verdict": "pass", **more}
    with console.capture() as caught:
        console.print(figures_table(job))
    return caught.get()


def test_promised_and_served_lengths_stand_side_by_side_with_the_measured_speed():
    seen = shown(acceptance_length_served={**LENGTH, "mean": 2.05}, serving=SERVING)

    assert seen.splitlines()[1].split() == ["task", "promised", "served", "95", "%", "interval", "prompts"]
    assert "2.100   2.050" in " ".join(line for line in seen.splitlines() if line.startswith("all"))
    assert "served by SGLang 0.5.23 in float32: the promised verify calls on 4 of 4 prompts" in seen
    assert "on this CPU (no figure for GPUs): 1.30x with 4 in flight (40 to 52 tokens/s)" in seen


def test_an_engine_that_kept_no_promise_is_said():
    seen = shown(acceptance_length_served=LENGTH, serving=SERVING | {"prompts_counted_otherwise": 3, "lossless": False})

    assert "the promised verify calls on 1 of 4 prompts; answers OTHER than without the drafter" in seen


def test_without_an_engine_nothing_is_said_of_serving():
    seen = shown(acceptance_length_served=None, serving=None)

    assert "served" not in seen
    assert seen.splitlines()[1].split() == ["task", "mean", "95", "%", "interval", "prompts"]


def test_the_logs_of_a_failed_job_end_with_what_it_failed_for(monkeypatch):
    reason = {"code": "vocab.coverage", "detail": "62 % of the tokens", "remedy": "raise vocab.draft_vocab_size"}
    answers = {
        "/jobs/job_1/logs": {"object": "list", "has_more": False, "last_seq": 1, "data": [
            {"seq": 1, "at": time.time(), "stage": "vocab", "unit": 0, "level": "info", "text": "counting"}]},
        "/jobs/job_1": {"object": "job", "id": "job_1", "status": "failed", "reason": reason},
    }  # fmt: skip
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answers[request.url.path]))
    monkeypatch.setattr(Api, "found", lambda *_: Api("http://127.0.0.1:1", transport))

    shown = CliRunner().invoke(app, ["logs", "job_1"])

    assert shown.exit_code == 0
    assert shown.stdout.strip().endswith("counting")
    assert shown.stderr.split() == f"vocab.coverage: {reason['detail']} remedy: {reason['remedy']}".split()


def test_a_moment_of_another_day_has_its_date():
    now = time.time()

    assert len(clock(now)) == len("23:59:59")
    assert clock(now - 3 * 86400).startswith(time.strftime("%Y-%m-%d ", time.localtime(now - 3 * 86400)))
    assert clock(1e300) == "--:--:--"
