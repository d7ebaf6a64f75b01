"""The demo's prompts are many, apart, balanced, and the same on every machine."""

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import prompts
import pytest
from wording import POOLS

SCRIPT = Path(prompts.__file__)

SPLITS: tuple[prompts.Split, ...] = ("train", "tune", "test")
TASKS = ["arith", "rewrite", "json", "code", "qa"]


def texts(drawn: list[prompts.Prompt]) -> list[str]:
    return [prompt["messages"][0]["content"] for prompt in drawn]


def words_of_pools(split: prompts.Split) -> set[str]:
    return {word for pool in POOLS for word in prompts.words_of(pool, split)}


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_there_are_at_least_two_thousand_distinct_training_prompts():
    drawn = texts(prompts.draw_prompts("train", per_task=500))

    assert len(set(drawn)) == len(drawn) == 2500


def test_no_word_of_a_pool_is_shared_between_splits():
    for one, other in combinations(SPLITS, 2):
        assert words_of_pools(one).isdisjoint(words_of_pools(other))


def test_every_word_has_exactly_one_split():
    counts = Counter(word for pool in POOLS.values() for word in pool)

    assert counts.most_common(1)[0][1] == 1
    assert set(counts) == set.union(*(words_of_pools(split) for split in SPLITS))


def test_every_pool_has_at_least_two_words_in_every_split():
    assert min(len(prompts.words_of(pool, split)) for pool in POOLS for split in SPLITS) >= 2


def test_no_number_is_shared_between_splits():
    numbers = {
        split: {n for text in texts(prompts.draw_prompts(split, 20)) for n in re.findall(r"\d+", text)}
        for split in SPLITS
    }

    for one, other in combinations(SPLITS, 2):
        assert numbers[one].isdisjoint(numbers[other])


def test_no_held_out_prompt_occurs_in_train():
    train = set(texts(prompts.draw_prompts("train", per_task=1000)))

    assert train.isdisjoint(texts(prompts.draw_prompts("test", per_task=50)))
    assert train.isdisjoint(texts(prompts.draw_prompts("tune", per_task=50)))


def test_every_prefix_is_balanced_over_the_tasks():
    tasks = [prompt["task"] for prompt in prompts.draw_prompts("train", per_task=7)]

    assert tasks == TASKS * 7


def test_a_longer_draw_starts_with_the_shorter_one():
    assert prompts.draw_prompts("train", per_task=30)[:50] == prompts.draw_prompts("train", per_task=10)


def test_another_seed_draws_other_prompts():
    assert prompts.draw_prompts("train", 5, seed=1) != prompts.draw_prompts("train", 5, seed=2)


@pytest.mark.parametrize("split", SPLITS)
def test_every_prompt_is_filled_and_asks_the_user_side_only(split: prompts.Split):
    for prompt in prompts.draw_prompts(split, per_task=40):
        [message] = prompt["messages"]
        assert message["role"] == "user"
        assert not re.search(r"\{\w|\{\}", message["content"]), message["content"]  # `{"` belongs to JSON


def test_the_script_writes_the_same_bytes_in_every_process(tmp_path: Path):
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"

    for out in (first, second):
        assert run_script("--split", "test", "--per-task", "4", "--seed", "3", "--out", str(out)).returncode == 0

    assert first.read_bytes() == second.read_bytes()
    lines = [json.loads(line) for line in first.read_text().splitlines()]
    assert lines == prompts.draw_prompts("test", per_task=4, seed=3)
    assert lines[0]["id"] == "test-arith-0000"
    assert len({line["id"] for line in lines}) == 20


def test_asking_for_more_than_the_pools_hold_says_which_task_and_how_many(tmp_path: Path):
    result = run_script("--split", "test", "--per-task", "5000", "--out", str(tmp_path / "too_many.jsonl"))

    assert result.returncode == 2
    assert re.search(r"task 'code' has about \d+ distinct prompts in split 'test'", result.stderr)
    assert not (tmp_path / "too_many.jsonl").exists()
