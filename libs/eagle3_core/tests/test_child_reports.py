"""What a stage reports while it runs, how its imports are begun early, and how its end is told when that is an error."""

import errno
import subprocess
import sys

import pytest

from eagle3_core.jobs.wire import ChildMessage, Failure, Progress
from eagle3_core.objects.local import LocalStore
from eagle3_core.stages.failures import failure_of
from eagle3_core.stages.preload import Preload
from eagle3_core.stages.reports import PipeReporter


class Recorder:
    """A channel that keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[ChildMessage] = []

    def send(self, message: ChildMessage) -> None:
        self.sent.append(message)


class Later:
    """A clock and its timers, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting = []

    def clock(self) -> float:
        return self.now

    def later(self, seconds, act) -> None:
        self.waiting.append((self.now + seconds, act))

    def pass_to(self, now: float) -> None:
        self.now = now
        due, self.waiting = [w for w in self.waiting if w[0] <= now], [w for w in self.waiting if w[0] > now]
        for _, act in due:
            act()


def test_progress_is_thinned_to_four_a_second_and_its_end_always_sent():
    channel, time = Recorder(), Later()
    reporter = PipeReporter(channel, time.clock, time.later)

    for step in range(101):
        time.pass_to(step / 64)
        reporter.progress(Progress(done=step, total=100))

    done = [message.progress.done for message in channel.sent]
    assert done[0] == 0
    assert done[-1] == 100
    assert 7 <= len(done) <= 9  # 100/64 of a second


def test_the_newest_progress_is_sent_even_if_none_follows():
    channel, time = Recorder(), Later()
    reporter = PipeReporter(channel, time.clock, time.later)

    for note in ("", "loading the verifier", "loading its weights"):
        reporter.progress(Progress(done=0, total=9, note=note))
    time.pass_to(0.25)

    assert [message.progress.note for message in channel.sent] == ["", "loading its weights"]


def test_no_progress_follows_the_end_of_a_unit():
    channel, time = Recorder(), Later()
    reporter = PipeReporter(channel, time.clock, time.later)
    reporter.progress(Progress(done=0, total=9))
    reporter.progress(Progress(done=1, total=9))

    reporter.close()
    time.pass_to(10)

    assert [message.progress.done for message in channel.sent] == [0, 1]


def test_preloading_ends_after_the_import_under_way_once_a_stage_needs_the_importer(tmp_path, monkeypatch):
    """The first module says that it is being imported and waits; the second must not be begun."""
    (tmp_path / "slow_one.py").write_text("import gate\ngate.entered.set()\nassert gate.leave.wait(30)\n")
    (tmp_path / "never.py").write_text("raise AssertionError('imported although a stage waits')\n")
    (tmp_path / "gate.py").write_text("import threading\nentered, leave = threading.Event(), threading.Event()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import gate

    channel = Recorder()
    preload = Preload(channel, ["slow_one", "never"])
    assert gate.entered.wait(30)
    preload.enough()
    gate.leave.set()
    preload.wait()

    assert "slow_one" in sys.modules
    assert channel.sent == []


def test_a_module_that_cannot_be_preloaded_is_only_said():
    channel = Recorder()

    preload = Preload(channel, ["no_such_module_at_all"])
    preload.wait()

    assert "no_such_module_at_all" in channel.sent[0].log.text


@pytest.mark.parametrize(
    ("stage", "field"), [("train", "training.batch_tokens"), ("generate", "data.regenerate.batch_size")]
)
def test_the_out_of_memory_errors_of_the_allocators_are_recognised(stage, field):
    cpu = RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried")

    problem = failure_of(cpu, stage).problem

    assert problem["code"] == "unit.out_of_memory"
    assert field in problem["remedy"]


FULL = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from eagle3_core.objects.local import LocalStore
from eagle3_core.stages.failures import failure_of

folder = Path(sys.argv[1])
(folder / "big").write_bytes(bytes(1 << 20))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
writes = {
    "scratch": lambda: (folder / "more").write_bytes(bytes(1 << 20)),
    "tensors": lambda: save_file({"a": np.zeros(1 << 20)}, folder / "t.safetensors"),
    "store": lambda: LocalStore(folder / "store").put_file("tenant/a", folder / "big"),
}
try:
    writes[sys.argv[2]]()
except Exception as error:
    sys.stdout.write(failure_of(error, "generate").model_dump_json())
"""


@pytest.mark.parametrize(
    ("written", "code"), [("scratch", "unit.disk_full"), ("tensors", "unit.disk_full"), ("store", "store.full")]
)
def test_a_disk_without_room_is_said_to_be_full_and_leaves_no_object(tmp_path, written, code):
    """A limit on the size of files refuses a write as a full disk does, without filling one."""
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path, written], capture_output=True, text=True, check=True)

    failure = Failure.model_validate_json(done.stdout)
    assert (failure.problem["code"], failure.retryable) == (code, True)
    assert list(LocalStore(tmp_path / "store").list("tenant")) == []


def test_a_disk_that_is_full_is_no_crash():
    full = OSError(errno.ENOSPC, "No space left on device", "/scratch/x")

    problem = failure_of(full, "train").problem

    assert problem["code"] == "unit.disk_full"
    assert "/scratch/x" in problem["detail"]
