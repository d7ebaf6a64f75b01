"""What Prometheus reads of the API."""

import re

import pytest
from prometheus_client import generate_latest

from aerie_api.metrics import registry_of


class Scrape:
    """The page as it is now."""

    def __init__(self, api):
        self.text = generate_latest(registry_of(api.house)).decode()

    def value(self, sample: str) -> float:
        found = re.search(rf"^{re.escape(sample)} (\S+)$", self.text, re.M)
        return float(found[1]) if found else 0.0


def test_queues_and_jobs_are_told_as_they_stand(api):
    api.post()
    api.clock.pass_(90)

    page = Scrape(api)
    assert page.value('aerie_queue_units{queue="prep"}') == 1
    assert page.value('aerie_queue_age_seconds{queue="prep"}') == 90
    assert page.value('aerie_queue_age_seconds{queue="train"}') == 0
    assert page.value('aerie_jobs{status="queued"}') == 1
    assert page.value("aerie_database_up") == 1


def test_a_finished_job_is_counted_once_with_all_that_it_took(api):
    before = Scrape(api)
    api.post()
    worker = api.worker()
    ran = worker.run()

    after = Scrape(api)

    def grew(sample: str) -> float:
        return after.value(sample) - before.value(sample)

    assert grew('aerie_attempts_total{cause="committed",stage="extract"}') == ran.count("extract") == 2
    assert grew('aerie_unit_seconds_sum{stage="extract"}') == 2 * 2.0
    assert grew('aerie_stage_seconds_count{stage="extract"}') == 1
    assert grew('aerie_stored_bytes_total{stage="extract"}') > 0
    assert grew("aerie_acceptance_length_sum") == pytest.approx(2.1)
    assert after.value('aerie_jobs{status="succeeded"}') == 1


def test_a_lease_that_ran_out_is_counted_where_it_was_lost(api):
    api.post()
    api.worker().take()
    before = Scrape(api)
    api.clock.pass_(61)
    api.house.claims.reap()
    api.house.claims.reap()

    after, lost = Scrape(api), 'aerie_lease_losses_total{stage="prepare"}'
    assert after.value(lost) - before.value(lost) == 1


def test_the_rate_of_running_units_is_added_up(api):
    api.post()
    worker = api.worker()
    unit = worker.take()
    worker.beat(unit, progress={"done": 1, "total": 2, "tokens_per_s": 1200, "note": "said in any words"})

    page = Scrape(api)
    assert page.value('aerie_tokens_per_second{stage="prepare"}') == 1200
    assert page.value('aerie_running_units{stage="prepare"}') == 1

    worker.beat(unit, progress={"done": 1, "total": 2})
    assert Scrape(api).value('aerie_tokens_per_second{stage="prepare"}') == 0


def test_requests_are_told_by_route_and_never_by_what_a_client_made_up(api):
    job = api.post()
    api.http.get(f"/jobs/{job['id']}")
    api.http.get("/jobs/nobodys-job")
    api.http.get("/made-up-path")
    api.http.request("BREW", "/jobs")

    page = Scrape(api).text
    assert 'route="/jobs/{job_id}",status="2xx"' in page
    assert 'route="/jobs/{job_id}",status="4xx"' in page
    assert 'method="OTHER"' in page
    assert not re.search(f"{job['id']}|nobodys|made-up|BREW", page)


def test_a_database_that_is_away_is_told_and_the_page_still_answers(api):
    api.house.db.engine.dispose()
    with api.house.db.write() as session:
        session.connection().exec_driver_sql("ALTER TABLE units RENAME TO away")

    page = Scrape(api)
    assert page.value("aerie_database_up") == 0
    assert "aerie_reaper_up" in page.text
