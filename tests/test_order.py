"""The tree is in order, and each rule that says so finds what is planted for it."""

import subprocess
from pathlib import Path

import pytest
from order import MOST_LINES, committed, dead_links, machine_paths, too_long

ROOT = Path(__file__).parents[1]
SOMEONE = "some" + "one"  # planted names are spelt apart, so that this file is itself in order
A_PAGE = "docs/" + "a.md"


@pytest.fixture(scope="module")
def texts():
    found = committed(ROOT)
    assert {"README.md", "tests/order.py", "locks/requirements.txt"} <= found.keys()
    return found


def test_what_lies_in_a_checkout_and_is_not_tracked_is_its_owners(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name in ("tracked.md", "mine.md"):
        (tmp_path / name).write_text("a text\n")
    (tmp_path / "my-model").symlink_to(tmp_path, target_is_directory=True)
    subprocess.run(["git", "add", "tracked.md"], cwd=tmp_path, check=True)

    assert committed(tmp_path) == {"tracked.md": "a text\n"}


def test_no_module_is_longer_than_the_cap(texts):
    assert too_long(texts) == []


def test_every_link_and_every_file_that_a_text_names_exists(texts):
    pictures = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*") if path.is_file()]

    assert dead_links(texts, [*texts, *pictures]) == []


def test_no_text_names_a_machine_or_a_registry(texts):
    assert machine_paths(texts) == []


def test_a_module_over_the_cap_is_found():
    texts = {"a.py": "x = 1\n" * (MOST_LINES + 1), "b.py": "x = 1\n" * MOST_LINES, "c.md": "x\n" * 999}

    assert [fault.split()[0] for fault in too_long(texts)] == ["a.py"]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (A_PAGE, "see [the tour](gone.md)"),
        (A_PAGE, "see [the tour](../b.py#part)"),
        ("README.md", "`jobs/" + "gone.py` decides"),
        ("README.md", "`libs/.../" + "gone.py` decides"),
        ("c.py", 'remedy="see docs/' + 'gone.md"'),
    ],
)
def test_a_link_to_nothing_is_found(page, text):
    assert len(dead_links({page: text}, [A_PAGE, "README.md", "c.py", "jobs/spec.py"])) == 1


def test_links_to_what_is_there_are_left_alone():
    text = "[a](../README.md#top) [b](https://example.org/x.md) [c](.) `jobs/spec.py` `core/.../spec.py` " + A_PAGE

    assert dead_links({A_PAGE: text}, [A_PAGE, "README.md", "core/jobs/spec.py"]) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", f'open("/home/{SOMEONE}/models")'),
        ("job.json", f"file:///home/{SOMEONE}/models"),
        (A_PAGE, f"cd /root/{SOMEONE}"),
        ("Makefile", f"cp x /work/{SOMEONE}"),
        ("README.md", f"written to /tmp/{SOMEONE}.json"),
        ("locks/requirements.txt", f"--index-url https://{SOMEONE}.example/simple"),
        ("locks/requirements.txt", f"a @ https://{SOMEONE}.example/a.whl"),
    ],
)
def test_a_place_of_one_machine_is_found(name, text):
    assert machine_paths({name: text})


def test_places_that_every_machine_has_are_left_alone():
    texts = {
        "a.py": "~/work/x $HOME/home/y file:///verifier /tmp /proc/1/stat",
        A_PAGE: "under /tmp or docs/work/x",
    }

    assert machine_paths(texts) == []
