"""One stage by hand, in a process of its own: what ran is reused, what was stopped goes on, what is wrong is said."""

import json
import os
import select
import signal
import subprocess
import sys

import pytest

from eagle3_core import strict_json
from eagle3_core.testing import tiny_job

PATIENCE_S = 240


class Stage:
    """`aerie stage` over one tiny job in one folder."""

    def __init__(self, folder):
        self.folder, self.environment = folder, {**os.environ, "AERIE_FILE_ROOTS": str(folder)}
        self.document = tiny_job(folder)

    def command(self, name, *more):
        (self.folder / "job.json").write_text(json.dumps(self.document))
        place = ["--job", str(self.folder / "job.json"), "--dir", str(self.folder / "stages")]
        return [sys.executable, "-m", "aerie_cli", "stage", name, *place, *more]

    def run(self, name, *more):
        """It, to its end: the exit status, the JSON document, what was said beside it."""
        done = subprocess.run(
            self.command(name, *more, "--json"),
            env=self.environment,
            capture_output=True,
            check=False,
            timeout=PATIENCE_S,
        )
        return done.returncode, strict_json.loads(done.stdout), done.stderr.decode()

    def start(self, name, *more):
        """It, running; what it says comes through stderr."""
        return subprocess.Popen(self.command(name, *more), env=self.environment, stderr=subprocess.PIPE)


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def test_a_stage_runs_once_and_is_reused_until_something_changes(stage):
    first, again, changed = (
        stage.run("prepare"),
        stage.run("prepare"),
        stage.run("prepare", "--set", "data.max_seq_len=64"),
    )

    assert [status for status, _, _ in (first, again, changed)] == [0, 0, 0]
    assert [told["reused_units"] for _, told, _ in (first, again, changed)] == [0, 1, 0]
    assert (stage.folder / "stages/objects" / first[1]["manifests"][0]["key"]).is_file()


def test_what_is_wrong_is_said_with_an_exit_status(stage):
    (stage.folder / "stages").mkdir()
    ledger = stage.folder / "stages/ledger.json"

    assert stage.run("nothing")[:2][0] == 2
    assert stage.run("prepare", "--set", "training.lr=-1")[1]["code"] == "request.invalid"
    ledger.write_text("[]")
    status, problem, _ = stage.run("prepare")
    assert (status, problem["code"]) == (1, "stage.ledger")
    assert str(ledger) in problem["detail"]


def test_a_folder_that_cannot_be_written_is_named(stage):
    (stage.folder / "stages").write_text("")

    status, problem, _ = stage.run("prepare")

    assert (status, problem["code"]) == (2, "up.folder")


@pytest.mark.slow
def test_every_stage_runs_by_its_own_command_after_those_it_reads(stage):
    for name in ("canary", "evaluate", "package"):
        status, told, said = stage.run(name)
        assert (status, told["stage"], told["reused_units"]) == (0, name, 0), said

    again = {name: stage.run(name)[1] for name in ("prepare", "generate", "train", "package")}

    assert all(told["reused_units"] == told["units"] > 0 for told in again.values())
    [manifest] = again["package"]["manifests"]
    listed = strict_json.loads((stage.folder / "stages/objects" / manifest["key"]).read_bytes())
    names = {file["name"] for file in listed["files"]}
    assert {"sglang/model.safetensors", "speculators/model.safetensors", "card.md"} <= names


@pytest.mark.slow
def test_a_stage_that_is_stopped_saves_and_goes_on_when_it_is_run_again(stage):
    stage.document["training"] |= {"epochs": 5000, "checkpoint_every_steps": 20}
    ended = []

    for number, heard in ((signal.SIGTERM, "checkpoint at step"), (signal.SIGINT, "going on from")):
        with stage.start("train") as running:
            try:
                said = hear(running, heard.encode())
                running.send_signal(number)
                _, rest = running.communicate(timeout=PATIENCE_S)
            finally:
                running.kill()
        ended.append((running.returncode, "stage.stopped" in (said + rest).decode()))

    assert ended == [(75, True), (130, True)]


def hear(process, words):
    """What `process` says until it has said `words`."""
    said = b""
    while words not in said:
        assert select.select([process.stderr], [], [], PATIENCE_S)[0], said
        piece = os.read(process.stderr.fileno(), 65536)
        assert piece, said.decode()
        said += piece
    return said
