"""The socket over which a unit's process asks for objects: the API's answers and refusals as they are, the token kept back."""

from __future__ import annotations

import contextlib
import socket
import stat
import threading

import pytest
from worker_stubs import Lost, assignment

from aerie_worker.claim import Control
from aerie_worker.lending import lending
from eagle3_core.errors import AerieError
from eagle3_core.jobs.refusals import Unreachable
from eagle3_core.jobs.wire import ObjectAsk
from eagle3_core.objects.lent_desk import Desk, reachable
from eagle3_core.objects.protocol import StoreUnavailable

ASK = ObjectAsk(do="get", key="t/prepare/j/00000/000001-a-b")


@pytest.fixture
def control(api):
    with contextlib.closing(Control(api.url, "worker-token", "w1", "i1", ["prep"], lent=True)) as control:
        yield control


@pytest.fixture
def place(tmp_path):
    """Deeper than the address of a socket may be long."""
    folder = tmp_path / ("d" * 60) / ("e" * 60)
    folder.mkdir(parents=True)
    return folder / "objects.sock"


def test_an_ask_goes_on_with_the_attempts_token(api, control, place):
    with lending(control, assignment("x"), place):
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        answer = Desk(place).ask(ASK)

    assert answer.url is None  # the scripted API answers {}
    said, token = api.next("objects")
    assert (said["key"], token) == (ASK.key, "attempt-token")
    assert not place.exists()


@pytest.mark.parametrize("refusal", [Lost("over"), StoreUnavailable("the store is away", remedy="wait")])
def test_a_refusal_arrives_as_what_it_is(api, control, place, refusal):
    api.answers["objects"] = refusal
    with lending(control, assignment("x"), place), pytest.raises(AerieError) as caught:
        Desk(place).ask(ASK)

    assert (caught.value.code, caught.value.detail) == (refusal.code, refusal.detail)
    assert caught.value.retryable is refusal.retryable


def test_whoever_asks_waits_while_the_api_is_away(api, control, place):
    api.answers["objects"] = 503
    heard = []
    with lending(control, assignment("x"), place):
        asking = threading.Thread(target=lambda: heard.append(Desk(place).ask(ASK)))
        asking.start()
        api.next("objects")
        del api.answers["objects"]
        asking.join(30)

    assert len(heard) == 1


def test_the_end_of_the_attempt_ends_the_waiting(api, control, place):
    api.answers["objects"] = 503
    faults = []

    def ask():
        try:
            Desk(place).ask(ASK)
        except Unreachable as error:
            faults.append(error)

    with lending(control, assignment("x"), place):
        asking = threading.Thread(target=ask)
        asking.start()
        api.next("objects")
    asking.join(30)

    assert len(faults) == 1
    with pytest.raises(Unreachable, match="does not answer"):
        Desk(place).ask(ASK)


def test_a_line_that_is_no_ask_reaches_nobody(api, control, place):
    with lending(control, assignment("x"), place), socket.socket(socket.AF_UNIX) as line:
        with reachable(place) as name:
            line.connect(name)
        line.sendall(b'{"do": "read everything"}\n')
        said = line.makefile("rb").readline()

    assert b'"object.ask"' in said
    assert api.heard("objects") == []
