"""One attempt: a real child process with scripted stages, a scripted API, and everything that can go wrong between them."""

import os
import signal
from queue import SimpleQueue

import pytest
from worker_stubs import Lost, assignment, gone, scripted_child

from aerie_worker import ear, pulse
from aerie_worker.children import ChildProcess
from aerie_worker.claim import Control
from aerie_worker.ear import Ear
from aerie_worker.pulse import CancelAsked, GiveBackAsked, LeaseGone
from aerie_worker.supervise import Attempt, KillAsked, StopAsked
from eagle3_core.errors import AerieError


def never_give_up(seconds: float) -> bool:
    return False


class Bench:
    """A child and what an attempt needs."""

    def __init__(self, api, folder) -> None:
        self.api = api
        self.inbox = SimpleQueue()
        self.control = Control(api.url, "worker-token", "w1", "i1", ["prep"])
        self.environment = {**os.environ, "AERIE_STORE": f"file://{folder}/store"}
        self.folder = folder
        self.use_a_fresh_child("scratch")

    def use_a_fresh_child(self, scratch: str) -> None:
        self.child = ChildProcess(scripted_child(), self.environment, self.folder / scratch, self.inbox)

    def attempt(self, does: str, grace_s: float = 25.0, fence: int = 1, pause=never_give_up) -> None:
        unit = assignment(does).model_copy(update={"fence": fence})
        Attempt(self.control, self.child, unit, self.inbox, grace_s).run(pause)

    def during(self, note: str, act) -> None:
        """Do `act` once the API heard progress that says `note`, in a thread; a fault there fails the test at its end."""
        import threading

        def wait_and_act() -> None:
            act(self.api.heartbeat_with_note(note))

        self.thread = threading.Thread(target=wait_and_act, daemon=True)
        self.thread.start()

    def failure(self) -> dict:
        return self.api.next("fail")[0]


@pytest.fixture
def bench(api, tmp_path, monkeypatch):
    monkeypatch.setattr(pulse, "NEWS_EVERY_S", 0.02)
    monkeypatch.setattr(pulse, "BEATS", 600)
    bench = Bench(api, tmp_path)
    yield bench
    bench.child.kill()
    bench.control.close()


def test_a_unit_is_run_and_committed_with_the_attempts_token(bench):
    bench.attempt("count")

    commit, token = bench.api.next("commit")
    assert commit["output"]["result"] == {"unit": 1, "loads": 1}
    assert token == "attempt-token"


def test_the_child_never_sees_the_attempts_token(bench):
    bench.attempt("echo")

    assert bench.api.next("commit")[0]["output"]["result"]["token"] == ""


def test_the_same_child_runs_the_next_unit_with_its_verifier_loaded(bench):
    bench.attempt("count")
    bench.attempt("count")

    results = [bench.api.next("commit")[0]["output"]["result"] for _ in range(2)]
    assert results == [{"unit": 1, "loads": 1}, {"unit": 2, "loads": 1}]


def test_everything_the_child_says_reaches_the_api(bench):
    bench.attempt("report")

    told = [beat for beat, _ in [*bench.api.heard("heartbeat"), bench.api.next("commit")]]
    assert [line["text"] for part in told for line in part["logs"]] == ["hello"]
    assert [(m["name"], m["value"]) for part in told for m in part["metrics"]] == [("loss", 0.5)]


def test_lines_that_libraries_write_become_lines_of_the_log(bench):
    bench.attempt("talk")

    told = [beat for beat, _ in [*bench.api.heard("heartbeat"), bench.api.next("commit")]]
    texts = [line["text"] for part in told for line in part["logs"]]
    assert texts == ["a library warns", "of this", "and that"]


def test_a_typed_failure_is_handed_on_as_it_is_and_the_child_serves_on(bench):
    bench.attempt("refuse")

    failure = bench.failure()
    assert (failure["cause"], failure["retryable"]) == ("failed", False)
    assert failure["problem"]["remedy"] == "give it a hat"
    assert not bench.child.spent


def test_a_crash_is_reported_with_its_traceback_and_the_child_is_not_used_again(bench):
    bench.attempt("crash")

    failure = bench.failure()
    assert failure["problem"]["code"] == "unit.crashed"
    assert any("1 // 0" in line["text"] for line in failure["logs"])
    assert bench.child.spent


def test_a_child_that_is_killed_is_a_loss_and_not_the_units_fault_and_its_last_words_are_kept(bench):
    bench.attempt("abort")

    failure = bench.failure()
    assert (failure["cause"], failure["retryable"]) == ("worker_lost", True)
    assert failure["problem"]["code"] == "unit.child_died"
    assert "killed by SIGKILL" in failure["problem"]["detail"]
    assert failure["problem"]["context"] == {"exit_status": -9, "last_lines": ["about to abort"]}


def test_a_cancelled_unit_saves_stops_and_is_reported_cancelled(bench, tmp_path):
    bench.during("waiting", lambda _: setattr(bench.api, "cancel", True))

    bench.attempt("wait")

    assert bench.failure()["cause"] == "cancelled"
    assert (tmp_path / "saved").exists()
    assert bench.api.heard("commit") == []


def test_a_unit_that_does_not_stop_is_killed_with_all_its_processes(bench):
    pids = []
    bench.during(
        "stubborn", lambda said: (pids.extend(map(int, said["note"].split()[1:])), setattr(bench.api, "cancel", True))
    )

    bench.attempt("stubborn", grace_s=0.2)

    assert bench.failure()["cause"] == "cancelled"
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("wish", [CancelAsked, GiveBackAsked, LeaseGone])
def test_what_was_wished_of_an_earlier_attempt_does_not_touch_the_next_one_at_the_same_unit(bench, wish):
    bench.inbox.put((None, wish("u1", fence=1)))

    bench.attempt("count", fence=2)

    assert bench.api.next("commit")[0]["output"]["result"]["unit"] == 1
    assert bench.api.heard("fail") == []


def test_a_retry_after_a_cancel_that_took_long_ends_in_one_clean_attempt(bench, monkeypatch):
    monkeypatch.setattr(ear, "LISTEN_S", 0.0)
    monkeypatch.setattr(ear, "PAUSE_S", 0.0)
    bench.api.answers["fail"] = 503  # the API holds the first attempt's unit for running meanwhile
    listener = Ear(bench.control, lambda wish: bench.inbox.put((None, wish)))
    listener.start()

    def cancel(_: object) -> None:
        bench.api.cancel = True
        bench.api.stop_unit("u1", fence=1, cancel=True)

    def settle(seconds: float) -> bool:
        """Let the API take the end, once it was asked several times more what is to stop."""
        bench.api.heard("stops")
        for _ in range(4):
            bench.api.next("stops")
        bench.api.cancel = False
        bench.api.stop_nothing()
        bench.api.answers.clear()
        return False

    bench.during("stubborn", cancel)
    bench.attempt("stubborn", grace_s=0.2, pause=settle)
    assert {told["cause"] for told, _ in bench.api.heard("fail")} == {"cancelled"}

    bench.use_a_fresh_child("scratch-2")
    bench.attempt("count", fence=2)
    listener.close()

    assert bench.api.next("commit")[0]["output"]["result"] == {"unit": 1, "loads": 1}
    assert bench.api.heard("fail") == []
    assert not bench.child.spent


def test_a_lost_lease_kills_the_child_and_uploads_nothing(bench):
    bench.during("waiting", lambda _: bench.api.answers.update(heartbeat=Lost("another worker has it")))

    bench.attempt("wait")

    assert gone(bench.child.pid)
    assert bench.api.heard("commit") == bench.api.heard("fail") == []


def test_a_commit_that_comes_too_late_is_dropped_and_said(bench, caplog):
    bench.api.answers["commit"] = Lost("another worker has it")

    bench.attempt("count")

    assert len(bench.api.heard("commit")) == 1
    assert "dropped, error lease.lost: another worker has it" in caplog.text


def test_a_stop_of_the_worker_preempts_the_unit(bench, tmp_path):
    bench.during("waiting", lambda _: bench.inbox.put((None, StopAsked())))

    bench.attempt("wait")

    failure = bench.failure()
    assert (failure["cause"], failure["problem"]["code"]) == ("preempted", "unit.preempted")
    assert (tmp_path / "saved").exists()


def test_a_second_signal_kills_at_once(bench):
    bench.during("stubborn", lambda _: [bench.inbox.put((None, ask)) for ask in (StopAsked(), KillAsked())])

    bench.attempt("stubborn")

    assert bench.failure()["cause"] == "preempted"
    assert gone(bench.child.pid)


def test_a_child_that_someone_else_stops_is_preempted_not_failed(bench):
    bench.during("waiting", lambda _: os.kill(bench.child.pid, signal.SIGTERM))

    bench.attempt("wait")

    assert bench.failure()["cause"] == "preempted"


def test_an_api_that_is_away_stops_nothing_and_loses_nothing(bench):
    def outage(_: object) -> None:
        bench.api.stop()
        os.kill(bench.child.pid, signal.SIGUSR1)  # the stage goes on, and ends while nobody listens

    back_on_the_third_try = iter([None, None, bench.api.start])
    bench.during("until told", outage)

    def pause(seconds: float) -> bool:
        if (act := next(back_on_the_third_try, None)) is not None:
            act()
        return False

    Attempt(bench.control, bench.child, assignment("until-told"), bench.inbox).run(pause)

    commit, _ = bench.api.next("commit")
    assert commit["output"]["result"]["unit"] == 1
    assert "said while nobody listened" in [line["text"] for line in commit["logs"]]


def test_an_api_that_answers_503_is_asked_again(bench):
    bench.api.answers["commit"] = 503
    tries = []

    def pause(seconds: float) -> bool:
        tries.append(seconds)
        if len(tries) == 4:
            del bench.api.answers["commit"]
        return False

    Attempt(bench.control, bench.child, assignment("count"), bench.inbox).run(pause)

    assert len(bench.api.heard("commit")) == 5
    assert tries[0] < tries[-1]


def test_an_end_that_the_api_does_not_take_becomes_a_failure(bench):
    class NotThis(AerieError):
        """No."""

        code, status = "commit.invalid", 422

    bench.api.answers["commit"] = NotThis("its manifest is missing")

    bench.attempt("count")

    failure = bench.failure()
    assert (failure["cause"], failure["retryable"]) == ("failed", False)
    assert "its manifest is missing" in failure["problem"]["detail"]
