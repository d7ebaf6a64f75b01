"""What README and CONTRIBUTING tell a person to type works: a job of one's own is run so.

That every command shown exists is `test_typed_commands.py`.

`make demo`, `make test` and `make lint` are run by `.ci/run`, as they are written.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from house import wait_for
from test_typed_commands import is_aerie

from eagle3_core.jobs.spec import parse_job
from eagle3_core.testing import tiny_conversations, tiny_verifier, write_jsonl

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def own_job() -> list[str]:
    """The commands of the indented blocks under 'Your own job', without their remarks, in order."""
    section = README.split("## Your own job")[1].split("\n## ")[0]
    lines = [re.split(r"\s+#\s", line)[0] for line in re.findall(r"^    (\S.*)$", section, re.MULTILINE)]
    return [command.strip() for line in lines for command in line.split(";")]


def smallest_job() -> dict[str, Any]:
    return yaml.safe_load(README.split("```yaml")[1].split("```")[0])


def quick_job(name: str, answer_tokens: int = 24) -> dict[str, Any]:
    """The smallest job for a model of 320 tokens, with short answers."""
    job = smallest_job()
    evaluation = {**job["evaluation"], "max_new_tokens": answer_tokens}
    data = {"regenerate": {"max_new_tokens": answer_tokens}}
    vocab = {"draft_vocab_size": None}
    return {**job, "name": name, "evaluation": evaluation, "data": data, "vocab": vocab, "training": {"epochs": 1}}


def test_the_options_that_the_demo_is_shown_with_exist():
    (given,) = re.findall(r'make demo DEMO_ARGS="(--\w+)', README)

    is_aerie(["demo", given, "1"])


def test_the_smallest_job_is_a_job():
    assert parse_job(smallest_job()).training.epochs == 3


class Terminal:
    """A folder with a model, prompts and the README's job, in which its commands are typed as they stand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".venv").symlink_to(sys.prefix)
        for place in ("models", "prompts"):
            (folder / place).mkdir()
        tiny_verifier(folder / "models/my-model", max_position_embeddings=8192)
        write_jsonl(folder / "prompts/train.jsonl", tiny_conversations(24))
        write_jsonl(folder / "prompts/held-out.jsonl", tiny_conversations(6, first=10_000))
        (folder / "job.yaml").write_text(yaml.safe_dump(quick_job("my-drafter")))

    def type(self, command: str, *, fine: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(["bash", "-c", command], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode in fine, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def jobs(self) -> dict[str, str]:
        """Name of each job -> (its id, its status)."""
        listed = json.loads(self.type(".venv/bin/aerie status --json"))["data"]
        return {job["name"]: (job["id"], job["status"]) for job in listed}


@pytest.mark.slow
def test_a_job_of_ones_own_goes_as_the_readme_says(tmp_path):
    terminal = Terminal(tmp_path)
    up, *commands = own_job()
    # A fixed port may be taken on a machine that runs tests; nothing else differs from what is printed.
    house = subprocess.Popen(["bash", "-c", f"exec {up} --port 0"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        wait_for("the API", lambda: (tmp_path / ".aerie/run/server.json").exists())
        ran = [run_as_printed(terminal, command) for command in commands]
    finally:
        house.terminate()
        house.wait(60)

    assert ran == ["plan", "submit", "watch", "logs", "cancel", "retry", "download", "inspect"]


def run_as_printed(terminal: Terminal, command: str) -> str:
    """Type a command of the README with its placeholders filled in; the word after `aerie`."""
    words = command.split()
    match words[1]:
        case "submit":
            terminal.type(command, fine=(0, 3))  # this model's drafter may well be worth nothing
            assert terminal.jobs()["my-drafter"][1] == "succeeded"
        case "watch":
            terminal.type(command.replace("JOB", terminal.jobs()["my-drafter"][0]), fine=(0, 3))  # as above
        case "cancel":
            # Nothing of the first job is reused with longer answers, so this one runs for a while.
            other = quick_job("another", answer_tokens=512)
            (terminal.folder / "another.json").write_text(json.dumps(other))
            terminal.type(".venv/bin/aerie submit another.json")
            terminal.type(command.replace("JOB", terminal.jobs()["another"][0]))
        case "retry":
            wait_for("the end of the other job", lambda: terminal.jobs()["another"][1] == "cancelled")
            terminal.type(command.replace("JOB", terminal.jobs()["another"][0]))
        case "inspect":
            terminal.type(command.replace("DIR", "my-drafter"))  # where `download` has put it
        case "plan":
            terminal.type(command)
        case _:
            terminal.type(command.replace("JOB", terminal.jobs()["my-drafter"][0]))
    return words[1]
