"""A drafter's files arrive whole or not at all, and nothing that lies there already is replaced."""

import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from aerie_cli import client
from aerie_cli.client import Api, Damaged
from aerie_cli.download import download_drafter
from eagle3_core import strict_json
from eagle3_core.digests import digest_bytes
from eagle3_core.errors import InvalidRequest

FILES = {"sglang/config.json": b"{}", "sglang/model.safetensors": b"tensors", "card.md": b"# card"}


class Store:
    """An API with one finished job, whose drafter's files it lists."""

    def __init__(self, drafter={"name": "tiny", "digest": "d" * 64}):  # noqa: B006 - never changed
        self.files = dict(FILES)
        self.drafter, self.unfinished, self.verdict = drafter, "running", "pass"
        self.list = [
            {"name": n, "size": len(d), "blake3": digest_bytes(d), "href": f"/jobs/job_1/artifacts/{n}"}
            for n, d in FILES.items()
        ]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/jobs/job_1":
            job = {
                "object": "job",
                "id": "job_1",
                "status": "succeeded" if self.drafter else self.unfinished,
                "drafter": self.drafter,
                "verdict": self.verdict if self.drafter else None,
            }
            return httpx.Response(200, json=job)
        if path.endswith("/artifacts"):
            return httpx.Response(200, json={"object": "list", "data": self.list, "has_more": False})
        return httpx.Response(200, content=self.files[path.split("/artifacts/", 1)[1]])


@pytest.fixture
def store(monkeypatch) -> Store:
    """What `aerie` reaches under any address."""
    served = Store()
    real = httpx.Client
    monkeypatch.setattr(
        client.httpx, "Client", lambda **more: real(**{**more, "transport": httpx.MockTransport(served)})
    )
    return served


def aerie(*arguments):
    from aerie_cli.main import app

    return CliRunner().invoke(app, [*arguments, "--url", "http://aerie"])


def found(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_finished_drafter_is_downloaded_under_its_name(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    told = strict_json.loads(aerie("download", "job_1", "--json").stdout)

    assert found(tmp_path / "tiny") == FILES
    assert told == {"folder": str(tmp_path / "tiny"), "digest": "d" * 64, "verdict": "pass", "files": list(FILES)}
    told = aerie("download", "job_1", "--out", str(tmp_path / "other")).stdout
    assert "3 files" in told
    assert "do not serve" not in told


def test_a_drafter_that_did_not_pass_is_not_to_be_served(store, tmp_path):
    store.verdict = "fail"

    told = aerie("download", "job_1", "--out", str(tmp_path / "other")).stdout

    assert "its verdict is fail: do not serve it" in told


@pytest.mark.parametrize("there", ["file", "full folder"])
def test_what_lies_there_already_is_not_replaced(store, tmp_path, there):
    target = tmp_path / "mine"
    if there == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "thesis.tex").write_text("mine")

    asked = aerie("download", "job_1", "--out", str(target), "--json")

    assert (asked.exit_code, strict_json.loads(asked.stdout)["code"]) == (2, "request.invalid")
    assert [p.name for p in tmp_path.rglob("*")] == (["mine"] if there == "file" else ["mine", "thesis.tex"])


def test_a_job_that_has_no_drafter_yet_says_what_to_wait_for(store, tmp_path):
    store.drafter = None

    asked = aerie("download", "job_1", "--out", str(tmp_path / "d"), "--json")

    problem = strict_json.loads(asked.stdout)
    assert (asked.exit_code, problem["code"]) == (2, "drafter.not_ready")
    assert "aerie watch job_1" in problem["remedy"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("name", "../escape", "leaves its folder"),
        ("name", "/etc/escape", "leaves its folder"),
        ("name", "sglang/../../escape", "leaves its folder"),
        ("name", "", "leaves its folder"),
        ("name", "a\0b", "leaves its folder"),
        ("href", "http://elsewhere/file", "sends to"),
        ("href", "//elsewhere/file", "sends to"),
        ("href", "file:///etc/passwd", "sends to"),
        ("size", 1, "more bytes, its manifest says 1"),
        ("size", 100, "arrived with 2 bytes, its manifest says 100"),
        ("blake3", "0" * 64, "arrived with digest"),
    ],
)
def test_a_list_that_lies_leaves_nothing_behind(store, tmp_path, field, value, says):
    store.list[0][field] = value

    asked = aerie("download", "job_1", "--out", str(tmp_path / "d"), "--json")

    problem = strict_json.loads(asked.stdout)
    assert (asked.exit_code, problem["code"]) == (1, "download.damaged")
    assert says in problem["detail"]
    assert list(tmp_path.rglob("*")) == []


def test_a_drafter_whose_name_leads_elsewhere_is_not_written_there(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store.drafter = {"name": "../../up", "digest": "d" * 64}

    assert json.loads(aerie("download", "job_1", "--json").stdout)["code"] == "download.damaged"


def test_a_download_that_replaces_its_own_folder_keeps_the_old_one_until_the_new_one_is_whole(store, tmp_path):
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "old").write_text("old")
    heard = []

    with Api("http://aerie") as api:
        store.files["card.md"] = b"# carD"
        with pytest.raises(Damaged, match=r"card\.md"):
            download_drafter(api, "job_1", folder, lambda *_: None, replace=True)
        assert found(folder) == {"old": b"old"}
        store.files["card.md"] = FILES["card.md"]
        download_drafter(api, "job_1", folder, lambda have, total: heard.append((have, total)), replace=True)

    assert found(folder) == FILES
    assert heard[-1] == (15, 15)
    assert list(tmp_path.iterdir()) == [folder]


def test_what_lies_beside_the_target_is_left_alone(store, tmp_path):
    beside = tmp_path / "mine.new"
    beside.mkdir()
    (beside / "thesis.tex").write_text("mine")

    asked = aerie("download", "job_1", "--out", str(tmp_path / "mine"))

    assert asked.exit_code == 0
    assert found(beside) == {"thesis.tex": b"mine"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "mine.new"]


@pytest.mark.parametrize("target", ["link to a folder", "link to nothing", "link to itself", "below a file"])
def test_a_target_that_cannot_become_the_folder_is_refused_before_anything_is_fetched(store, tmp_path, target):
    (tmp_path / "full").mkdir()
    (tmp_path / "file").write_text("mine")
    leads = {"link to a folder": "full", "link to nothing": "nowhere", "link to itself": "d"}
    if target in leads:
        (tmp_path / "d").symlink_to(leads[target])
    before = sorted(tmp_path.rglob("*"))
    store.files.clear()  # any transfer would fail otherwise than expected

    asked = aerie(
        "download", "job_1", "--out", str(tmp_path / ("file/d" if target == "below a file" else "d")), "--json"
    )

    problem = strict_json.loads(asked.stdout)
    assert (asked.exit_code, problem["code"]) == (2, "request.invalid")
    assert "--out" in problem["remedy"]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_empty_is_filled_and_one_on_the_way_made_with_the_users_rights(store, tmp_path):
    (tmp_path / "empty").mkdir()

    codes = [aerie("download", "job_1", "--out", str(tmp_path / place)).exit_code for place in ("empty", "a/b/../c")]

    assert codes == [0, 0]
    assert found(tmp_path / "empty") == found(tmp_path / "a" / "c") == FILES
    assert (tmp_path / "a" / "c").stat().st_mode == (tmp_path / "a").stat().st_mode


@pytest.mark.parametrize("replace", [False, True])
def test_a_target_that_is_filled_or_held_during_the_transfer_is_kept_and_nothing_else_left(
    store, tmp_path, monkeypatch, replace
):
    folder = tmp_path / "new" / "drafter"

    def meanwhile(have, total):
        folder.mkdir(exist_ok=True)
        (folder / "thesis.tex").write_text("mine")

    if replace:
        move = Path.replace
        monkeypatch.setattr(Path, "replace", lambda self, to: _held() if self.name == "fresh" else move(self, to))

    with Api("http://aerie") as api, pytest.raises(InvalidRequest, match="cannot be put there"):
        download_drafter(api, "job_1", folder, meanwhile, replace=replace)

    assert found(tmp_path) == {"new/drafter/thesis.tex": b"mine"}
    assert list(folder.parent.iterdir()) == [folder]


def _held():
    raise OSError(16, "Device or resource busy")


def test_folders_that_were_made_for_a_download_that_failed_go_again(store, tmp_path):
    store.list[0]["blake3"] = "0" * 64

    asked = aerie("download", "job_1", "--out", str(tmp_path / "a" / "b" / "c"))

    assert asked.exit_code == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_job_that_ended_without_a_drafter_says_how_to_take_it_up_again(store, tmp_path, status):
    store.drafter, store.unfinished = None, status

    asked = aerie("download", "job_1", "--out", str(tmp_path / "d"), "--json")

    assert "aerie retry job_1" in strict_json.loads(asked.stdout)["remedy"]
