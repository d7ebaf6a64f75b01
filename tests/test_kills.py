"""Any process of the house may die at any moment: the job still ends, once, with the undisturbed run's drafter.

Eleven kills in three jobs, each at a moment that the job itself announces (a stage that runs, a share of it done). A kill
that disturbed nothing would prove nothing, so each must leave a trace: an attempt that did not end with a commit, or
another process that answers for the API.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from house import House, running_house, wait_for

from eagle3_core.jobs.graph import STAGES
from eagle3_core.testing import tiny_verifier

pytestmark = pytest.mark.slow

SCHEDULES: dict[str, list[tuple[str, str, float]]] = {
    "given": [("api", "prepare", 0), ("child", "canary", 0), ("worker", "extract", 0)],
    "middle": [("child", "generate", 0.2), ("api", "generate", 0.5), ("child", "train", 0.3), ("worker", "train", 0.6)],
    "late": [("api", "train", 0.5), ("child", "evaluate", 0), ("worker", "evaluate", 0.5), ("child", "package", 0)],
}
"""Per job: (who dies, in which stage, from which share of that stage on). In `given` the answers are given: only there extract
computes, since generate keeps the states of its own pass."""
TOO_SHORT = {"vocab"}
"""Stages that a warm child is through with before anybody could see them run."""


def write_prompts(path: Path, count: int, word: str, answer: str = "") -> Path:
    """Questions, with `answer` to each where there is one."""
    said = [{"role": "assistant", "content": answer}] if answer else []
    lines = [
        {
            "id": f"{word}-{i}",
            "task": ("echo", "count")[i % 2],
            "messages": [{"role": "user", "content": f"{word} {i} {i * 7}"}, *said],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def small_job(folder: Path) -> dict[str, Any]:
    verifier = folder / "verifier"
    tiny_verifier(verifier, layers=8, hidden=32)
    return {
        "name": "killed",
        "verifier": {"model": str(verifier), "dtype": "float32", "device": "cpu"},
        "datasets": [{"uri": str(write_prompts(folder / "train.jsonl", 64, "train"))}],
        "data": {"max_seq_len": 128, "unit_samples": 8, "regenerate": {"max_new_tokens": 24, "batch_size": 4}},
        "vocab": {"draft_vocab_size": 64, "min_coverage": 0},
        "training": {"max_steps": 240, "epochs": 1000, "batch_tokens": 256, "lr": 1e-3, "checkpoint_every_steps": 20, "threads": 1},
        "evaluation": {
            "prompts": [{"uri": str(write_prompts(folder / "test.jsonl", 16, "test"))}],
            "max_new_tokens": 24, "unit_prompts": 4, "gate": {"min_ci_low": 1.0},
        },
    }  # fmt: skip


def given_job(folder: Path) -> dict[str, Any]:
    """`small_job` with answers given, and few steps: what dies in it dies before the training."""
    job = small_job(folder)
    write_prompts(folder / "train.jsonl", 64, "train", "one two three four")
    job["data"] |= {"unit_samples": 4, "regenerate": {"enabled": False}}
    job["training"] |= {"max_steps": 20}
    return job


def under_way(job: dict[str, Any], stage: str, share: float) -> bool:
    """Whether `stage` runs now and at least `share` of it is done. Raises AssertionError once it is over."""
    entry = next(s for s in job["stages"] if s["name"] == stage)
    assert entry["state"] != "succeeded", f"{stage} was over before {share:.0%} of it could be seen"
    return entry["state"] == "running" and entry["progress_percentage"] >= 100 * share


def cut_short(house: House, job_id: str, stage: str) -> int:
    """Attempts at `stage` that ended without a commit."""
    attempts = house.request("GET", f"/jobs/{job_id}/attempts").json()["data"]
    return sum(a["stage"] == stage and a["outcome"] not in (None, "committed") for a in attempts)


def kill(house: House, job_id: str, part: str, stage: str) -> None:
    """Kill `part` and wait for the trace that it leaves. Raises AssertionError if there is none."""
    attempts, answering = cut_short(house, job_id, stage), house.api_pid
    wait_for(f"a living {part} to kill", lambda: house.kill(part))
    if part == "api":
        wait_for("another API", lambda: house.job(job_id) and house.api_pid != answering)
    else:
        wait_for(f"an attempt at {stage} to be cut short", lambda: cut_short(house, job_id, stage) > attempts)


def run(folder: Path, job: dict[str, Any], kills: list[tuple[str, str, float]], inputs: Path) -> dict[str, Any]:
    """The finished job, disturbed by `kills` on its way."""
    with running_house(folder, [inputs]) as house:
        job_id = house.post(job)
        for part, stage, share in kills:
            wait_for(f"{stage} at {share:.0%}", lambda s=stage, x=share: under_way(house.job(job_id), s, x))
            kill(house, job_id, part, stage)
        return house.finished(job_id)


def require_same(finished: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    assert finished["status"] == "succeeded", finished["reason"]
    assert finished["drafter"]["digest"] == undisturbed["drafter"]["digest"]
    assert finished["acceptance_length"] == undisturbed["acceptance_length"]


def undisturbed_run(house: Path, inputs: Path, job: dict[str, Any]) -> dict[str, Any]:
    finished = run(house, job, [], inputs)
    assert finished["status"] == "succeeded", finished["reason"]
    return finished


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("inputs")
    return folder, small_job(folder)


@pytest.fixture(scope="module")
def quiet_house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the house in which `undisturbed` ran; it can be started again."""
    return tmp_path_factory.mktemp("undisturbed") / "house"


@pytest.fixture(scope="module")
def undisturbed(inputs: tuple[Path, dict[str, Any]], quiet_house: Path) -> dict[str, Any]:
    return undisturbed_run(quiet_house, *inputs)


@pytest.mark.parametrize("schedule", ["middle", "late"])
def test_a_job_whose_processes_are_killed_ends_with_the_same_drafter(
    schedule: str, inputs: tuple[Path, dict[str, Any]], undisturbed: dict[str, Any], tmp_path: Path
):
    folder, job = inputs

    finished = run(tmp_path / "house", job, SCHEDULES[schedule], folder)

    require_same(finished, undisturbed)


def test_a_job_of_given_answers_whose_processes_are_killed_ends_with_the_same_drafter(tmp_path: Path):
    folder = tmp_path / "inputs"
    folder.mkdir()
    job = given_job(folder)

    finished = run(tmp_path / "house", job, SCHEDULES["given"], folder)

    require_same(finished, undisturbed_run(tmp_path / "undisturbed", folder, job))


def test_a_second_job_with_more_training_reuses_answers_and_states_and_gets_its_own_card(
    inputs: tuple[Path, dict[str, Any]], undisturbed: dict[str, Any], quiet_house: Path
):
    folder, job = inputs
    more = {"training": {**job["training"], "max_steps": job["training"]["max_steps"] + 20}}
    with running_house(quiet_house, [folder]) as house:
        second = house.finished(house.post({**job, **more, "name": "second"}))
        events = house.request("GET", f"/jobs/{second['id']}/events").json()["data"]
        card = house.request("GET", f"/jobs/{second['id']}/artifacts/card.md").text

    reused = {stage["name"]: stage["reused"] for stage in second["stages"]}
    assert second["status"] == "succeeded", second["reason"]
    assert [name for name, again in reused.items() if again] == ["prepare", "canary", "generate", "extract", "vocab"]
    assert any("extract" in event["message"] and undisturbed["id"] in event["message"] for event in events)
    assert second["drafter"]["digest"] != undisturbed["drafter"]["digest"]
    assert "second" in card.splitlines()[0] + card[:400]


def test_a_job_whose_worker_dies_while_it_is_cancelled_is_cancelled_and_can_be_finished(
    inputs: tuple[Path, dict[str, Any]], undisturbed: dict[str, Any], tmp_path: Path
):
    folder, job = inputs
    with running_house(tmp_path / "house", [folder]) as house:
        job_id = house.post(job)
        wait_for("generate at 20%", lambda: under_way(house.job(job_id), "generate", 0.2))
        asked = house.request("POST", f"/jobs/{job_id}/cancel")
        house.kill("worker")
        cancelled = house.finished(job_id)
        again = house.request("POST", f"/jobs/{job_id}/retry")
        finished = house.finished(job_id)

    assert (asked.status_code, again.status_code) == (202, 202)
    assert [cancelled["status"], finished["status"]] == ["cancelled", "succeeded"], finished["reason"]
    assert finished["drafter"]["digest"] == undisturbed["drafter"]["digest"]


def test_every_stage_that_computes_is_disturbed_and_every_part_dies():
    moments = [moment for kills in SCHEDULES.values() for moment in kills]
    assert len(moments) >= 10
    assert {stage for _, stage, _ in moments} == set(STAGES) - TOO_SHORT
    assert {part for kills in SCHEDULES.values() for part, _, _ in kills} == set(House.PARTS)
