"""The worker's ear: a stop is told once for each attempt, however often the API is asked."""

from queue import SimpleQueue

import pytest
from worker_stubs import TOKEN

from aerie_worker import ear
from aerie_worker.claim import Control
from aerie_worker.ear import Ear
from aerie_worker.pulse import CancelAsked, GiveBackAsked


@pytest.fixture
def wishes(api, monkeypatch):
    """What an ear passes on that asks again as soon as it was answered."""
    monkeypatch.setattr(ear, "LISTEN_S", 0.0)
    monkeypatch.setattr(ear, "PAUSE_S", 0.0)
    control, heard = Control(api.url, TOKEN, "w1", "i1", ["prep"]), SimpleQueue()
    listener = Ear(control, heard.put)
    listener.start()
    yield heard
    listener.close()
    listener._thread.join(30)
    control.close()


def ask_again(api, times: int) -> dict[str, int]:
    """Wait until the ear has asked `times` more; what it knew of at last."""
    api.heard("stops")
    return [api.next("stops")[0]["known"] for _ in range(times)][-1]


def test_a_stop_is_told_once_for_each_attempt(api, wishes):
    api.stop_unit("u1", fence=1, cancel=True)
    assert wishes.get(timeout=30) == CancelAsked("u1", 1)
    ask_again(api, times=4)

    api.stop_unit("u1", fence=2, give_back=True)

    assert wishes.get(timeout=30) == GiveBackAsked("u1", 2)
    assert ask_again(api, times=4) == {"u1": 2}
    assert wishes.empty()


def test_a_stop_stays_known_when_nothing_is_to_stop_and_only_the_latest_do(api, wishes, monkeypatch):
    monkeypatch.setattr(ear, "MOST_KNOWN", 2)
    for unit in ("u1", "u2", "u3"):
        api.stop_unit(unit, fence=1, cancel=True)
        assert wishes.get(timeout=30) == CancelAsked(unit, 1)
        api.stop_nothing()

    assert ask_again(api, times=3) == {"u2": 1, "u3": 1}
