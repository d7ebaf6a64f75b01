"""Where output goes, and what ends a command from outside: pipes that close, full disks, odd encodings, Ctrl-C."""

import json
import os
import select
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from aerie_cli.output import document, plain
from aerie_cli.report import job_view, jobs_table
from eagle3_core import strict_json

PATIENCE_S = 120
AERIE = [sys.executable, "-m", "aerie_cli"]


@pytest.fixture
def posted(aerie, named, tmp_path) -> str:
    """The id of a job that waits for ever, since there is no worker."""
    (tmp_path / "job.json").write_text(json.dumps(named))
    return aerie.json("submit", str(tmp_path / "job.json"))["id"]


def run(aerie, *arguments, **streams) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own."""
    environment = {**os.environ, "AERIE_URL": aerie.url, **streams.pop("environment", {})}
    return subprocess.run([*AERIE, *arguments], env=environment, check=False, timeout=PATIENCE_S, **streams)


def test_a_reader_that_has_gone_is_status_141_and_no_complaint(aerie, posted):
    for arguments in (("status", posted), ("status", posted, "--json")):
        reader, writer = os.pipe()
        os.close(reader)
        done = run(aerie, *arguments, stdout=writer, stderr=subprocess.PIPE)
        os.close(writer)

        assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["--version"], ["--help"]])
def test_a_full_disk_is_an_error_and_never_success(aerie, posted, arguments):
    with open("/dev/full", "wb") as full:
        done = run(aerie, *arguments, stdout=full, stderr=subprocess.PIPE)

    assert done.returncode == 1
    assert b"system.refused: No space left on device" in done.stderr


def test_no_stdout_at_all_is_no_error(aerie, posted):
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -m aerie_cli status {posted} >&-', sys.executable],
        env={**os.environ, "AERIE_URL": aerie.url}, stderr=subprocess.PIPE, check=False, timeout=PATIENCE_S,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_does_not_end_a_command_and_json_stays_whole(aerie, named, tmp_path, encoding):
    named |= {"name": f"note-in-{encoding}", "metadata": {"note": "grün ✓ \U0001f985"}}
    (tmp_path / "job.json").write_text(json.dumps(named))
    environment = {"PYTHONIOENCODING": encoding}

    done = run(aerie, "submit", str(tmp_path / "job.json"), "--json", stdout=subprocess.PIPE, environment=environment)
    shown = run(aerie, "inspect", "job", json.loads(done.stdout)["id"], stdout=subprocess.PIPE, environment=environment)

    assert json.loads(done.stdout.decode(encoding))["metadata"] == named["metadata"]
    assert shown.returncode == 0


def test_ctrl_c_leaves_a_watch_with_status_130_and_says_that_the_job_goes_on(aerie, posted):
    watching = subprocess.Popen(
        [*AERIE, "watch", posted],
        env={**os.environ, "AERIE_URL": aerie.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    said = hear(watching, b"waits: no worker")

    watching.send_signal(signal.SIGINT)
    out, rest = watching.communicate(timeout=PATIENCE_S)

    assert watching.returncode in (130, -signal.SIGINT)
    assert f"the job goes on: `aerie watch {posted}`".encode() in said + rest
    assert out == b""
    assert b"Traceback" not in said + rest


def test_ctrl_c_ends_a_followed_log_without_a_word(aerie, posted):
    following = subprocess.Popen(
        [*AERIE, "logs", posted, "--follow", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "AERIE_URL": aerie.url, "PYTHONFAULTHANDLER": "1", "PYTHONPROFILEIMPORTTIME": "1"},
    )  # fmt: skip
    hear(following, b"aerie_cli.main")  # everything is imported: from here on an interrupt is the command's

    following.send_signal(signal.SIGINT)
    out, rest = following.communicate(timeout=PATIENCE_S)

    # Python ends itself by the signal where it was in an `exec` when it came; a shell calls that 130 as well.
    assert following.returncode in (130, -signal.SIGINT)
    assert out == b""
    assert b"Traceback" not in rest


def hear(process: subprocess.Popen[bytes], words: bytes) -> bytes:
    """What `process` says on stderr until it has said `words`."""
    said = b""
    while words not in said:
        assert select.select([process.stderr], [], [], PATIENCE_S)[0], said
        piece = os.read(process.stderr.fileno(), 65536)
        assert piece, said
        said += piece
    return said


def test_json_holds_nothing_that_json_does_not_know(capsys):
    document({"nan": float("nan"), "inf": [float("-inf")], "half": "a\ud800", 3: ("x",), "esc": "\x1b[2J"})

    said = capsys.readouterr().out
    assert strict_json.loads(said) == {"nan": None, "inf": [None], "half": "a\ufffd", "3": ["x"], "esc": "\x1b[2J"}
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("over\rwrite", r"over\rwrite"),
        ("\x9b2J", r"\x9b2J"),
        ("abc\u202edcb", r"abc\u202edcb"),
        ("\ud800", r"\ud800"),
        ("\x07\x08", r"\x07\x08"),
        ("grün ✓", "grün ✓"),
    ],
)
def test_what_others_say_cannot_move_the_cursor(text, shown):
    assert plain({"k": [text]}) == {"k": [shown]}


JOB = {
    "object": "job", "id": "job_c34edb6ba898b67c039c475b", "name": "a-name-of-some-length", "status": "failed", "stage": "train",
    "warnings": ["\x1b[2J"], "reason": {"code": "x.y", "detail": "it\rbroke [bold]", "remedy": "mend"},
    "stages": [
        {"name": "evaluate", "state": "succeeded", "progress_percentage": 100.0, "seconds": 3725.0, "shards": {"done": 2, "total": 2}},
        {"name": "train", "state": "a-new-state", "progress_percentage": 41.5, "note": "a note that is longer than any line " * 4},
    ],
}  # fmt: skip


@pytest.mark.parametrize("width", [20, 40, 72, 80, 200])
def test_a_terminal_of_any_width_shows_ids_and_states_whole(width):
    console = Console(width=width, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115

    with console.file:
        console.print(job_view(JOB, width))
        console.print(jobs_table([JOB], width))

    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert text.count(JOB["id"]) == 2 or width < 38
    assert ("a-new-state" in text and "1:02:05" in text) or width < 40


def test_no_color_is_honoured_and_a_pipe_gets_neither_colours_nor_narrow_columns(aerie, posted):
    piped = run(aerie, "status", posted, stdout=subprocess.PIPE).stdout
    plain_terminal = run(
        aerie, "status", posted, stdout=subprocess.PIPE, environment={"NO_COLOR": "1", "FORCE_COLOR": "1"}
    ).stdout

    assert b"\x1b" not in piped
    assert posted.encode() in piped
    assert b"\x1b[3" not in plain_terminal
