"""The demo's own parts: the job it makes, the name it finds, what it downloads, the report it writes."""

import json

import httpx
import pytest

from aerie_cli import demo
from aerie_cli.client import Api, Damaged
from aerie_cli.download import download_drafter
from eagle3_core.digests import digest_bytes

FILES = {"sglang/config.json": b"{}", "sglang/model.safetensors": b"tensors", "card.md": b"# card"}


class Store:
    """An API that has a drafter's files and some names in use."""

    def __init__(self, files=None, names=()):
        self.files = dict(FILES if files is None else files)
        self.listed = {name: digest_bytes(data) for name, data in self.files.items()}
        self.names = set(names)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/jobs":
            return self._post(json.loads(request.content))
        if path.endswith("/artifacts"):
            listed = [
                {"name": n, "size": len(self.files[n]), "blake3": d, "href": f"{path}/{n}"}
                for n, d in self.listed.items()
            ]
            return httpx.Response(200, json={"object": "list", "data": listed, "has_more": False})
        return httpx.Response(200, content=self.files[path.split("/artifacts/", 1)[1]])

    def _post(self, job) -> httpx.Response:
        if job["name"] in self.names:
            problem = {"code": "drafter.name_in_use", "status": 409, "detail": "in use"}
            return httpx.Response(409, json=problem)
        return httpx.Response(202, json={"object": "job", "id": "job_1", "name": job["name"]})


def api(store: Store) -> Api:
    return Api("http://aerie", httpx.MockTransport(store))


def test_a_drafter_is_downloaded_whole_and_replaces_the_last_one(tmp_path):
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "stale").write_text("old")
    heard = []

    with api(Store()) as client:
        download_drafter(client, "job_1", tmp_path / "drafter", lambda have, total: heard.append((have, total)))

    found = {
        str(p.relative_to(tmp_path / "drafter")): p.read_bytes()
        for p in (tmp_path / "drafter").rglob("*")
        if p.is_file()
    }
    assert found == FILES
    assert heard[-1] == (15, 15)


def test_a_damaged_download_is_refused_and_the_last_drafter_stays(tmp_path):
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "good").write_text("old")
    store = Store()
    store.files["sglang/model.safetensors"] = b"tensorz"

    with api(store) as client, pytest.raises(Damaged, match=r"sglang/model\.safetensors"):
        download_drafter(client, "job_1", tmp_path / "drafter", lambda *_: None)

    assert (tmp_path / "drafter" / "good").read_text() == "old"


@pytest.mark.parametrize("name", ["../escape", "/etc/escape", "sglang/../../escape"])
def test_a_file_name_that_leaves_the_folder_is_refused(tmp_path, name):
    with api(Store({name: b"x"})) as client, pytest.raises(Damaged, match="leaves its folder"):
        download_drafter(client, "job_1", tmp_path / "drafter", lambda *_: None)

    assert not (tmp_path / "escape").exists()


def test_a_name_in_use_gets_the_next_free_number():
    with api(Store(names=["smollm2-demo", "smollm2-demo-2"])) as client:
        posted = demo.post(client, {"name": "smollm2-demo"})

    assert posted["name"] == "smollm2-demo-3"


def test_places_are_filled_in_wherever_they_stand():
    filled = demo.fill({"a": ["${TRAIN}", {"b": "file:${TEST}"}], "c": 3}, {"TRAIN": "/x", "TEST": "/y"})

    assert filled == {"a": ["/x", {"b": "file:/y"}], "c": 3}


def test_the_report_has_the_figures_of_the_job_and_says_what_was_reused():
    job = {
        "id": "job_1", "name": "smollm2-demo", "status": "succeeded", "verdict": "pass", "acceptance_length": {"mean": 2.1},
        "acceptance_by_position": [0.6, 0.5, 0.4], "lossless": True, "looping_share": 0.1, "seen_ngram_share": 0.4,
        "prompts": 70, "reason": None,
        "stages": [
            {"name": "generate", "seconds": None, "reused": True, "reused_units": 3, "reused_from": ["job_0"]},
            {"name": "train", "seconds": 12.5, "reused": False, "reused_units": 0},
        ],
    }  # fmt: skip

    report = demo.make_report(job, {"digest": "d", "sglang_dir": "/s", "speculators_dir": "/p"}, 61.24)

    assert report["acceptance_length"] == {"mean": 2.1}
    assert report["stages"][0] == {
        "name": "generate", "seconds": 0.0, "reused": True, "reused_units": 3, "from_earlier_jobs": True,
    }  # fmt: skip
    assert (report["seconds"], report["prompts"], report["drafter"]["digest"]) == (61.2, 70, "d")


def test_a_script_that_fails_ends_the_demo_with_its_name(tmp_path):
    (tmp_path / "verifier.py").write_text("raise SystemExit(7)")

    with pytest.raises(demo.ExampleFailed, match=r"verifier\.py ended with exit status 7"):
        demo.make_job(tmp_path, tmp_path, [])


def test_outside_a_checkout_the_demo_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "demo.py"))

    with pytest.raises(demo.NoCheckout) as refused:
        demo.checkout()

    assert "aerie submit" in refused.value.remedy
