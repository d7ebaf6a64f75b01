"""The process that runs stages, fed and read through its real pipes; its stages are scripted by `scripted_child.py`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_core.jobs.spec import parse_job
from eagle3_core.jobs.states import Cause
from eagle3_core.jobs.wire import Assignment, ChildMessage, UnitSlice

SCRIPT = Path(__file__).with_name("scripted_child.py")


def assignment(does: str, stage: str = "prepare") -> Assignment:
    """An assignment whose scripted stage does `does`."""
    spec = parse_job(
        {
            "name": "tiny",
            "verifier": {"model": "file:///verifier"},
            "datasets": [{"uri": "file:///train.jsonl"}],
            "evaluation": {"prompts": [{"uri": "file:///test.jsonl"}]},
            "metadata": {"does": does},
        }
    )
    return Assignment(
        unit_run_id="u1", job_id="j1", tenant="default", stage=stage, unit=UnitSlice(index=0, start=0, stop=1, of=1),
        attempt=1, fence=1, token="", key="k" * 64, spec=spec, sources={}, inputs={}, results={}, lease_s=60,
    )  # fmt: skip


class Running:
    """A child with its pipes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--parent", str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "AERIE_STORE": f"file://{folder}/store", "AERIE_SCRATCH": str(folder / "scratch")},
        )  # fmt: skip
        assert self.next().ready

    def give(self, does: str, stage: str = "prepare") -> "Running":
        self.feed(assignment(does, stage).model_dump_json())
        return self

    def feed(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def next(self) -> ChildMessage:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the child ended without an answer"
        return ChildMessage.model_validate_json(line)

    def end(self) -> list[ChildMessage]:
        """Everything up to and including the unit's commit or failure."""
        messages = [self.next()]
        while messages[-1].commit is None and messages[-1].failure is None:
            messages.append(self.next())
        return messages


@pytest.fixture
def child(tmp_path):
    running = Running(tmp_path)
    yield running
    for pipe in (running.process.stdin, running.process.stdout, running.process.stderr):
        pipe.close()
    running.process.kill()
    running.process.wait()


def test_a_unit_is_committed_and_the_next_one_finds_the_process_warm(child):
    first = child.give("count").end()[-1].commit
    second = child.give("count").end()[-1].commit

    assert (first.output.result, second.output.result) == ({"loads": 1, "unit": 1}, {"loads": 1, "unit": 2})


def test_what_a_library_prints_does_not_break_the_protocol(child):
    message = child.give("print").end()[-1]

    assert message.commit is not None


def test_metrics_and_logs_arrive_in_order_before_the_commit(child):
    messages = child.give("report").end()

    kinds = [next(iter(m.model_dump(exclude_none=True))) for m in messages]
    assert kinds == ["log", "metric", "progress", "commit"]
    assert messages[2].progress.done == 9


def test_a_known_error_keeps_its_code_remedy_and_whether_it_helps_to_try_again(child):
    failure = child.give("refuse").end()[-1].failure

    assert (failure.cause, failure.retryable) == (Cause.FAILED, False)
    assert failure.problem["code"] == "request.invalid"
    assert failure.problem["remedy"] == "give it a hat"


def test_an_unforeseen_error_is_a_crash_with_its_traceback_and_the_process_lives_on(child):
    failure = child.give("crash").end()[-1].failure

    assert (failure.problem["code"], failure.retryable) == ("unit.crashed", True)
    assert "ZeroDivisionError" in failure.problem["detail"]
    assert any("1 // 0" in line.text for line in failure.logs)
    assert child.give("count").end()[-1].commit is not None


def test_running_out_of_memory_says_which_field_makes_room(child):
    failure = child.give("devour", stage="vocab").end()[-1].failure

    assert failure.problem["code"] == "unit.out_of_memory"
    assert "on a machine with more memory" in failure.problem["remedy"]


def test_a_line_that_is_no_assignment_names_its_faults_and_ends_nothing(child):
    child.feed(json.dumps({"job_id": 3}))

    failure = child.end()[-1].failure

    assert failure.problem["code"] == "child.protocol"
    assert "unit_run_id" in failure.problem["detail"]
    assert child.give("count").end()[-1].commit is not None


def test_asked_to_stop_the_stage_saves_and_the_process_ends_with_75(child):
    assert child.give("wait").next().progress.note == "waiting"

    child.process.send_signal(signal.SIGTERM)
    failure = child.end()[-1].failure

    assert (failure.cause, failure.problem["code"]) == (Cause.PREEMPTED, "unit.preempted")
    assert child.process.wait(20) == 75
    assert (child.folder / "saved").read_text() == "saved"


def test_asked_to_stop_while_idle_it_ends_with_75_at_once(child):
    child.process.send_signal(signal.SIGTERM)

    assert child.process.wait(20) == 75


def test_the_end_of_its_input_ends_the_process(child):
    child.process.stdin.close()

    assert child.process.wait(20) == 0


def test_scratch_files_are_gone_after_the_unit(child):
    child.give("litter").end()

    assert list((child.folder / "scratch").iterdir()) == []


def test_the_process_dies_with_its_parent(tmp_path):
    """The parent in between is killed with SIGKILL and can tell nobody."""
    middle = subprocess.Popen(
        [sys.executable, "-c", MIDDLE, str(SCRIPT)], stdout=subprocess.PIPE,
        env={**os.environ, "AERIE_STORE": f"file://{tmp_path}/store"},
    )  # fmt: skip
    with middle:
        pid = int(middle.stdout.readline())
        handle = os.pidfd_open(pid)

        middle.kill()

        assert wait_for_end(handle)


MIDDLE = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, sys.argv[1], "--parent", str(os.getpid())],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def wait_for_end(pidfd: int) -> bool:
    """Whether the process of `pidfd` ended within 20 s (the descriptor turns readable then)."""
    import select

    try:
        return bool(select.select([pidfd], [], [], 20)[0])
    finally:
        os.close(pidfd)
