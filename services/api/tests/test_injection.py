"""What somebody writes into names, ids and lines stays one value: in the log, in headers, in streams."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from eagle3_core.telemetry import logs

FORGED = 'x\r\n{"level": "critical", "event": "forged"}\r\nSet-Cookie: a=b\x1b[2J\x00\u2028'


@pytest.fixture
def lines() -> Iterator[Callable[[], list[Any]]]:
    """What the process's one handler wrote: every line of it must be a JSON object."""
    stream, root = io.StringIO(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logs.configure(stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:], root.level = handlers, level


def test_nothing_that_a_request_holds_begins_a_line_of_the_log_or_a_field_of_its_own(api, document, lines):
    quoted = "x%0d%0a%7B%22level%22:%22critical%22%7D"
    api.http.get(f"/jobs/{quoted}")
    api.http.get("/jobs", params={"name": FORGED, "level": "critical"})
    api.http.request("GET\tX", "/jobs")
    api.http.post(
        "/jobs", json=document(metadata={"note": FORGED}), headers={"X-Request-ID": "a b", "User-Agent": "\t"}
    )
    api.http.post("/jobs", json=document(name=FORGED))

    found = lines()
    assert len([line for line in found if "ms" in line]) == 5
    assert {line["level"] for line in found} <= {"info", "warning"}
    assert not [line for line in found if line["event"] == "forged"]


def test_a_worker_s_name_and_a_stage_s_words_stay_in_their_fields(api, lines):
    api.post()
    refused = api.worker(FORGED).ask()
    assert refused.status_code in (204, 422)
    unit = api.worker().take()
    told = {"at": 1.0, "level": "info", "text": FORGED}
    assert api.worker().beat(unit, logs=[told]).status_code in (200, 422)
    api.worker().fail(unit, code="unit.crashed")

    assert {line["level"] for line in lines()} <= {"info", "warning"}


def test_words_of_a_stage_are_one_event_of_a_stream(api, document):
    job = api.post()
    worker = api.worker()
    unit = worker.take()
    problem = {"code": "unit.crashed", "status": 500, "title": "t", "detail": "it broke\n\nevent: forged\ndata: {}\n\n"}
    worker.tell(unit, "fail", {"cause": "failed", "retryable": False, "problem": problem})
    with api.http.stream("GET", f"/jobs/{job['id']}/events", headers={"Accept": "text/event-stream"}) as stream:
        said = "".join(stream.iter_text())

    assert "it broke" in said
    assert "\nevent: forged" not in said


def test_the_name_of_a_file_adds_no_header_to_its_download(api):
    odd = 'sglang/a"\r\nX-Evil: 1\r\n.json'
    job = api.post()
    worker = api.worker()
    while (unit := worker.take()).stage != "package":
        worker.commit(unit)
    made = worker.made(unit)
    worker.commit(unit, made)

    for name in (
        odd,
        "../../worker.token",
        "..%2f..%2fworker.token",
        "/etc/passwd",
        "sglang/../../secret",
        "sglang//config.json",
    ):
        answer = api.http.get(f"/jobs/{job['id']}/artifacts/{name.replace(chr(13), '%0d').replace(chr(10), '%0a')}")
        assert answer.status_code == 404, name
        assert "x-evil" not in answer.headers
        assert api.house.worker_token not in answer.text
