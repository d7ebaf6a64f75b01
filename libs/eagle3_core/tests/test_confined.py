"""Whatever is asked of a confined process, the one who asked goes on within the limits."""

from __future__ import annotations

import os
import re
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_core import confined
from eagle3_core.confined import Confined, Limits, ServiceFailed, Unanswered
from eagle3_core.errors import AerieError
from eagle3_core.verifier.folder import VerifierTemplate

SERVICE = "confined_service:service"
SMALL = Limits(cpu_s=60, wall_s=120, memory_bytes=256 << 20)


@pytest.fixture(autouse=True)
def _(monkeypatch):
    """A process finds the service beside this file."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


@pytest.fixture
def process():
    with Confined(SERVICE, SMALL) as process:
        yield process


@pytest.fixture
def brief():
    with Confined(SERVICE, replace(SMALL, cpu_s=0.5)) as process:
        yield process


def unanswered(process, **request) -> Unanswered:
    with pytest.raises(Unanswered) as caught:
        process.ask(request)
    assert (caught.value.at, caught.value.pointer) == (f"doing {request['do']}", "/verifier/model")
    assert process.ask({"do": "echo"}) == {"do": "echo"}
    return caught.value


def test_one_process_answers_one_question_after_another(process):
    assert process.ask({"do": "echo", "text": "ü" * 100_000}) == {"do": "echo", "text": "ü" * 100_000}
    assert process.ask({"do": "pid"}) == process.ask({"do": "pid"}) != os.getpid()


@pytest.mark.parametrize("do", ["spin", "spin in C"])
def test_time_is_bounded_in_python_and_in_c(brief, do):
    assert "more than 0.5 s of CPU time" in unanswered(brief, do=do).why


def test_an_answer_that_nobody_waited_for_is_nobodys(process, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(confined, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.ask({"do": "echo", "text": "the first question"})

    assert process.ask({"do": "echo", "text": "the second"})["text"] == "the second"


def interrupted(*_):
    raise KeyboardInterrupt


def test_one_look_may_be_given_less_time_than_all(process):
    assert "more than 0.05 s of CPU time" in unanswered(process, do="spin", cpu_s=0.05).why


def test_looks_that_follow_one_another_do_not_make_the_wait_longer():
    with (
        Confined(SERVICE, Limits(cpu_s=60, wall_s=2, memory_bytes=1 << 30)) as process,
        pytest.raises(Unanswered) as caught,
    ):
        process.ask({"do": "chatter"})

    assert "no answer within 2 s" in caught.value.why


@pytest.mark.parametrize("do", ["eat", "eat slowly"])
def test_memory_is_bounded(process, do):
    assert re.search("more memory|256 MiB", unanswered(process, do=do).why)


def test_a_process_that_is_killed_is_replaced(process):
    assert "status -9" in unanswered(process, do="die").why


def test_nobody_is_blamed_for_what_an_earlier_question_left_behind(process):
    process.ask({"do": "hoard"})

    assert process.ask({"do": "need", "mib": 150}) == 150 << 20


def test_nobody_is_blamed_for_a_process_that_died_while_it_waited(process):
    os.kill(process.ask({"do": "pid"}), signal.SIGKILL)

    assert process.ask({"do": "echo"}) == {"do": "echo"}


def test_a_service_that_does_not_start_is_no_fault_of_the_question():
    with (
        Confined("eagle3_core.confined:no_such_service", SMALL) as process,
        pytest.raises(ServiceFailed, match="did not start"),
    ):
        process.ask({})


def test_the_environments_secrets_stay_outside(monkeypatch):
    monkeypatch.setenv("AERIE_SECRET", "swordfish")
    with Confined(SERVICE, SMALL) as process:
        assert "AERIE_SECRET" not in process.ask({"do": "environment"})


def test_a_question_that_hangs_is_given_up():
    with (
        Confined(SERVICE, Limits(cpu_s=60, wall_s=0.2, memory_bytes=1 << 30)) as process,
        pytest.raises(Unanswered) as caught,
    ):
        process.ask({"do": "sleep"})

    assert "no answer within 0.2 s" in caught.value.why


def test_errors_of_ours_arrive_as_themselves(process):
    with pytest.raises(VerifierTemplate, match="no such turn") as caught:
        process.ask({"do": "refuse"})

    assert (caught.value.remedy, caught.value.pointer) == ("another template", "/verifier/model")
    assert isinstance(caught.value, AerieError)


def test_a_panic_of_a_library_is_no_answer(process):
    assert "index out of bounds" in unanswered(process, do="panic").why


@pytest.mark.parametrize(("do", "says"), [("raise", "ZeroDivisionError"), ("answer in no JSON", "set is not JSON")])
def test_a_fault_of_the_service_is_raised_with_its_traceback(process, do, says):
    with pytest.raises(ServiceFailed, match="Traceback") as caught:
        process.ask({"do": do})

    assert says in str(caught.value)
    assert process.ask({"do": "echo"}) == {"do": "echo"}


def test_it_writes_no_file(process, tmp_path):
    with pytest.raises(ServiceFailed, match="File too large"):
        process.ask({"do": "write", "path": str(tmp_path / "x")})

    assert (tmp_path / "x").read_bytes() == b""


def test_it_ends_with_the_one_who_asks(process):
    pid = process.ask({"do": "pid"})
    channel: socket.socket = process._socket

    channel.shutdown(socket.SHUT_RDWR)

    assert process._process.wait(60) == 0
    assert pid == process._process.pid
