"""The doorbell over a real Redis: the API's end rings, a worker's real Celery hears, and everything that may go wrong between.

Claims are answered by a desk instead of the API, so that a test sees what each ring made the worker ask.
"""

from __future__ import annotations

import json
import pickle
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from house import wait_for
from servers import redis as servers

from aerie_api.broker import BrokerAway, CeleryBroker, Ring
from aerie_worker.doorbells.celery import DoorbellBroken, Rung
from eagle3_core.jobs.refusals import Unreachable

pytestmark = [
    pytest.mark.slow,
    # Celery warns of a default that will change, whatever one has set.
    pytest.mark.filterwarnings("ignore::celery.exceptions.CPendingDeprecationWarning"),
]
QUEUES = ["prep", "extract"]


class Desk:
    """Hands out the units that a test laid down, by queue, and remembers what was asked for."""

    def __init__(self) -> None:
        self.units: list[tuple[str, str]] = []
        self.asked: SimpleQueue[list[str]] = SimpleQueue()
        self.away = False

    def claim(self, wait_s: float, queues: list[str]) -> Any:
        self.asked.put(queues)
        if self.away:
            raise Unreachable("nobody there")
        found = next((unit for unit in self.units if unit[1] in queues), None)
        if found is not None:
            self.units.remove(found)
        return SimpleNamespace(id=found[0]) if found else None


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[servers.Redis]:
    server = servers.start(tmp_path / "redis")
    yield server
    server.stop()


@pytest.fixture
def broker(redis: servers.Redis) -> Iterator[CeleryBroker]:
    broker = CeleryBroker(redis.url)
    yield broker
    broker.close()


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def door(redis: servers.Redis, desk: Desk) -> Iterator[Rung]:
    """A worker at the door that never asks by itself."""
    door = Rung(desk, redis.url, QUEUES, "w1", ask_every_s=1e6)  # type: ignore[arg-type]
    yield door
    door.close()


def test_a_ring_makes_the_worker_ask_for_what_its_queue_has(door, broker, desk):
    assert door.wait() is None  # a worker that starts asks first for what is there already
    desk.units = [("u1", "extract"), ("u2", "prep")]
    broker.send([Ring("u2", "prep")])

    unit = door.wait()

    assert unit.id == "u2"
    assert [desk.asked.get(), desk.asked.get()] == [QUEUES, ["prep"]]


def test_after_a_unit_the_worker_asks_for_more_before_it_listens_again(door, broker, desk):
    door.wait()
    desk.units = [("u1", "prep"), ("u2", "extract")]
    broker.send([Ring("u1", "prep")])

    assert [door.wait().id, door.wait().id, door.wait()] == ["u1", "u2", None]


def test_a_busy_worker_leaves_further_rings_to_those_who_are_free(door, broker, desk):
    door.wait()
    desk.units = [("u1", "prep")]
    broker.send([Ring("u1", "prep")])
    assert door.wait().id == "u1"

    broker.send([Ring("u2", "prep"), Ring("u3", "prep")])

    assert broker.waiting("prep") == 2  # Redis serves whoever waits for a message as it comes in: nobody did
    assert [door.wait(), door.wait()] == [None, None]
    wait_for("the second ring to be heard", lambda: broker.waiting("prep") < 2)


def test_no_ring_is_held_on_the_broker_once_it_is_heard(door, broker, redis):
    door.wait()
    broker.send([Ring("u1", "prep")])
    door.wait()

    with redis.client() as client:
        assert not client.exists("aerie:unacked", "aerie:unacked_index")


def test_a_doubled_ring_and_one_for_a_unit_that_is_done_find_nothing(door, broker, desk):
    door.wait()
    desk.units = [("u1", "prep")]
    broker.send([Ring("u1", "prep"), Ring("u1", "prep"), Ring("u0", "prep")])

    assert door.wait().id == "u1"
    assert [door.wait(), door.wait(), door.wait()] == [None, None, None]
    wait_for("the queue to be empty", lambda: broker.waiting("prep") == 0)


def test_a_ring_heard_while_the_api_is_away_is_kept_and_no_other_taken(door, broker, desk):
    door.wait()
    desk.away = True
    broker.send([Ring("u1", "prep"), Ring("u2", "prep")])
    for _ in range(3):
        with pytest.raises(Unreachable):
            door.wait()
    assert broker.waiting("prep") == 1

    desk.away, desk.units = False, [("u1", "prep")]

    assert door.wait().id == "u1"


def test_the_bell_rings_again_after_redis_was_flushed_or_killed(door, broker, desk, redis):
    door.wait()
    for blow in (redis.flush, redis.restart):
        blow()
        desk.units = [("u1", "prep")]
        wait_for("a broker that takes rings", lambda: sent(broker, Ring("u1", "prep")))

        assert door.wait().id == "u1"
        assert door.wait() is None


def sent(broker: CeleryBroker, ring: Ring) -> bool:
    try:
        broker.send([ring])
    except BrokerAway:
        return False
    return True


def test_a_broker_that_is_gone_is_said_and_not_waited_for(broker, redis):
    redis.kill()

    with pytest.raises(BrokerAway, match="does not answer") as away:
        broker.send([Ring("u1", "prep")])

    assert redis.password not in away.value.text()


def test_a_worker_that_hears_nothing_asks_by_itself(redis, desk):
    redis.kill()
    door = Rung(desk, redis.url, QUEUES, "w1", ask_every_s=0.01)
    try:
        assert door.wait() is None
        desk.units = [("u1", "prep")]
        assert door.wait().id == "u1"
    finally:
        door.close()


def test_a_worker_whose_doorbell_has_ended_says_so_instead_of_waiting_for_ever(desk):
    door = Rung(desk, "", QUEUES, "w1", ask_every_s=1e6, listen=lambda: None)
    door.wait()

    with pytest.raises(DoorbellBroken, match="has ended"):
        door.wait()


def forged(kind: str, body: bytes, **headers: str) -> bytes:
    """A message as kombu lays it into a list, saying what a stranger made up."""
    envelope = {
        "body": b64encode(body).decode(), "content-encoding": "utf-8", "content-type": kind, "headers": headers,
        "properties": {
            "delivery_tag": "forged", "body_encoding": "base64",
            "delivery_info": {"exchange": "", "routing_key": "prep"},
        },
    }  # fmt: skip
    return json.dumps(envelope).encode()


@pytest.mark.parametrize(
    "message",
    [
        forged("application/json", b"no task"),
        forged("application/json", b"[[], {}, {}]", task="os.system", id="1"),
        forged("application/json", b"[[], {}, {}]", task="aerie.ring", id="1"),
        forged("application/x-python-serialize", pickle.dumps(([], {}, {})), task="aerie.ring", id="1"),
    ],
    ids=["no-task", "other-task", "no-unit", "pickle"],
)
def test_what_is_no_ring_is_dropped_and_the_next_ring_is_heard(message, door, broker, desk, redis):
    door.wait()
    with redis.client() as client:
        client.lpush("aerie:prep", message)
    desk.units = [("u1", "prep")]
    broker.send([Ring("u1", "prep")])

    assert door.wait().id == "u1"


def test_noise_on_the_broker_ends_a_doorbell_and_not_the_next_one(door, broker, desk, redis):
    door.wait()
    with redis.client() as client:
        client.lpush("aerie:prep", b"not even an envelope")
    with pytest.raises(DoorbellBroken):
        door.wait()
    again = Rung(desk, redis.url, QUEUES, "w1", ask_every_s=1e6)  # type: ignore[arg-type]
    try:
        again.wait()
        desk.units = [("u1", "prep")]
        broker.send([Ring("u1", "prep")])

        assert again.wait().id == "u1"
    finally:
        again.close()


def test_a_ring_carries_the_units_id_and_nothing_else_of_the_house(broker, redis):
    broker.send([Ring("unit_1", "prep")])

    with redis.client() as client:
        message = json.loads(client.lrange("aerie:prep", 0, -1)[0])
        keys = client.keys()

    assert message["headers"]["kwargsrepr"] == "{'stage_run_id': 'unit_1'}"
    assert all(key.startswith(b"aerie:") for key in keys)
