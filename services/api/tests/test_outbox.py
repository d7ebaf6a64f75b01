"""Who is rung for, when, and how often: rings follow the commit that made a unit claimable, and cost nobody anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from aerie_api.broker import BrokerAway, Ring
from aerie_api.leases.outbox import Outbox


class Queue:
    """A broker that keeps rings until a test takes them."""

    def __init__(self) -> None:
        self.rings: list[Ring] = []
        self.away = False

    def send(self, given: Sequence[Ring]) -> None:
        if self.away:
            raise BrokerAway("gone")
        self.rings += given

    def waiting(self, queue: str) -> int:
        return Counter(ring.queue for ring in self.rings)[queue]

    def close(self) -> None:
        pass


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def outbox(api, queue) -> Outbox:
    return Outbox(api.house.db, queue, again_s=10.0, clock=api.clock)


def test_every_unit_is_rung_for_once_on_its_own_queue(api, outbox, queue):
    api.post()
    worker, unit = api.reach("generate")
    outbox.publish()
    assert [ring.queue for ring in queue.rings] == ["extract"]  # the second slice: the first is taken
    worker.commit(unit)
    worker.commit(worker.take())
    outbox.publish()
    outbox.publish()
    assert [ring.queue for ring in queue.rings] == ["extract"] * 3


def test_a_unit_that_was_claimed_before_its_ring_went_out_is_not_rung_for(api, outbox, queue):
    api.post()
    api.worker().take()
    outbox.publish()
    assert queue.rings == []


def test_what_waits_after_a_failure_is_rung_for_when_its_pause_is_over(api, outbox, queue):
    api.post()
    worker = api.worker()
    worker.fail(worker.take())
    assert outbox.publish() == pytest.approx(10.0)
    assert queue.rings == []
    api.clock.pass_(10)
    outbox.publish()
    assert len(queue.rings) == 1


def test_a_broker_that_is_away_keeps_nobody_and_loses_no_ring(api, outbox, queue):
    queue.away = True
    job = api.post()
    with pytest.raises(BrokerAway):
        outbox.publish()
    assert api.job(job["id"])["status"] == "queued"
    queue.away = False
    outbox.publish()
    assert len(queue.rings) == 1


def test_rings_that_are_lost_are_rung_again_once_nobody_came(api, outbox, queue):
    api.post()
    outbox.publish()
    queue.rings.clear()
    assert outbox.top_up() == 0
    api.clock.pass_(11)
    assert outbox.top_up() == 1
    outbox.publish()
    assert len(queue.rings) == 1


def test_a_fleet_that_is_busy_for_hours_finds_no_more_rings_than_units(api, outbox, queue, document):
    for name in ("fox", "hen", "owl"):
        api.post(document(name))
    for _ in range(100):
        api.clock.pass_(60)
        outbox.top_up()
        outbox.publish()
    assert len(queue.rings) == 3


def test_two_api_processes_ring_once(api, outbox, queue):
    api.post()
    other = Outbox(api.house.db, queue, again_s=10.0, clock=api.clock)
    outbox.publish()
    other.publish()
    assert len(queue.rings) == 1


def test_a_paused_job_is_rung_for_when_it_is_resumed(api, outbox, queue):
    job = api.post()
    api.http.post(f"/jobs/{job['id']}/pause")
    outbox.publish()
    assert queue.rings == []
    api.http.post(f"/jobs/{job['id']}/resume")
    outbox.publish()
    assert len(queue.rings) == 1


def test_readiness_tells_a_dead_broker_from_a_dead_process(make_api, queue):
    api = make_api(broker=queue, watched=True, ring_again_s=0.01)
    assert api.http.get("/readyz").json()["broker"] == "ok"
    queue.away = True
    api.post()
    said = until(lambda: api.http.get("/readyz").json(), lambda answer: answer["status"] == "degraded")
    assert said["broker"] == "gone"
    queue.away = False
    until(lambda: api.http.get("/readyz").json(), lambda answer: answer["broker"] == "ok")
    assert len(queue.rings) >= 1
    api.house.ringer.stop()
    dead = api.http.get("/readyz")
    assert (dead.status_code, dead.json()["code"]) == (503, "api.not_ready")


def until(look, good):
    for _ in range(10_000):
        if good(found := look()):
            return found
    raise AssertionError(f"it stays {found}")


def test_an_embedded_house_has_no_broker_to_lose(api):
    assert api.http.get("/readyz").json()["broker"] is None
