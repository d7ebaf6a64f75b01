"""One real job in an embedded house, seen as an operator sees it: its trace, its log lines, its metrics."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from house import House, running_house
from otlp import Collector, collecting
from prometheus_client.parser import text_string_to_metric_families

from eagle3_core.testing import tiny_job

pytestmark = pytest.mark.slow
STAGES = ("prepare", "generate", "train", "evaluate", "package")
"""Some of those that ran. Not `extract`: the states that `generate` kept are its result."""
TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Seen:
    """A finished job and the house that did it."""

    def __init__(self, house: House, collector: Collector, job: dict[str, Any]) -> None:
        self.house, self.collector, self.job = house, collector, job

    def lines(self, process: str) -> list[dict[str, Any]]:
        """The log of one process. A line that is no JSON object fails the test."""
        return [json.loads(line) for line in (self.house.folder / f"logs/{process}.log").read_text().splitlines()]

    def metrics(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """What the API's metrics say: (sample, values of its labels) -> value."""
        url = json.loads((self.house.folder / "run/server.json").read_text())["metrics_url"]
        page = urllib.request.urlopen(url).read().decode()
        return {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("observed")
    (folder / "in").mkdir()
    with collecting() as collector:
        settings = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        with running_house(folder / "house", [folder / "in"], 1, settings) as house:
            sent = {"traceparent": f"00-{TRACE}-{CLIENT}-01", "X-Request-ID": "the-posts-id"}
            posted = house.request("POST", "/jobs", headers=sent, json=tiny_job(folder / "in"))
            assert posted.status_code == 202, posted.text
            job = house.finished(posted.json()["id"])
            assert job["status"] == "succeeded", job
            yield Seen(house, collector, job)


def test_one_trace_leads_from_the_clients_post_to_the_process_that_ran_each_stage(seen):
    def one(service: str, name: str) -> Any:
        return seen.collector.until(f"{name} of {service}", lambda span: (span.service, span.name) == (service, name))

    posted = one("aerie-api", "POST /jobs")
    assert (posted.trace, posted.parent) == (TRACE, CLIENT)
    for stage in STAGES:
        worked, ran = one("aerie-worker", f"unit {stage}"), one("aerie-child", f"run {stage}")
        assert worked.trace == ran.trace == TRACE
        assert (worked.parent, ran.parent) == (posted.id, worked.id)
        assert ran.attributes["aerie.job"] == seen.job["id"]
    committed = one("aerie-api", "POST /internal/v1/units/{unit_run_id}/commit")
    assert committed.trace == TRACE


def test_every_log_line_is_json_and_says_which_request_and_which_unit_it_is_about(seen):
    post = next(line for line in seen.lines("api") if line.get("request_id") == "the-posts-id" and "ms" in line)
    assert (post["method"], post["path"], post["status"], post["job"]) == ("POST", "/jobs", 202, seen.job["id"])
    of_units = [line for line in seen.lines("worker-1") if "committed" in line["event"]]
    assert {line["stage"] for line in of_units} >= set(STAGES)
    for line in of_units:
        assert (line["job"], line["attempt"]) == (seen.job["id"], 1)
        assert isinstance(line["unit"], int)
    commits = [line for line in seen.lines("api") if line.get("path", "").endswith("/commit")]
    assert {line["stage"] for line in commits} >= {"prepare", "train"}
    assert all(line["request_id"] for line in commits)


def test_no_log_line_holds_the_house_s_token_or_a_lease_s(seen):
    token = (seen.house.folder / "run/worker.token").read_text().strip()
    for log in (seen.house.folder / "logs").iterdir():
        assert token not in log.read_text()
        assert "Bearer" not in log.read_text()


def test_the_metrics_on_their_own_port_tell_what_the_job_took_and_was_worth(seen):
    told = seen.metrics()
    for stage in STAGES:
        assert told["aerie_stage_seconds_count", (stage,)] == 1
        assert told["aerie_stored_bytes_total", (stage,)] > 0
    drafters = seen.house.request("GET", "/drafters").json()["data"]
    length = drafters[0]["acceptance_length"]["mean"]
    assert told["aerie_acceptance_length_sum", ()] == pytest.approx(length)
    assert told["aerie_jobs", ("succeeded",)] == 1
    assert told["aerie_queue_age_seconds", ("train",)] == 0
    assert told["aerie_database_up", ()] == told["aerie_reaper_up", ()] == 1
    assert not seen.house.request("GET", "/metrics").is_success, "the API's own port tells no metrics"
