"""What cannot succeed is refused when it is posted: a stable code, the field, the remedy, and no row in the database.

The API is the real one, over the real preflight and a real (tiny) verifier folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from aerie_api.app import create_app
from aerie_api.settings import Settings
from eagle3_core.testing import tiny_job, tiny_verifier, write_jsonl

Job = dict[str, Any]
Spoil = Callable[[Job, Path], None]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    settings = Settings(
        run_dir=tmp_path / "run", data_dir=tmp_path / "data", file_roots=(tmp_path / "in",), max_body_bytes=65536
    )
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8000") as http:
        yield http


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "in").mkdir()
    return tiny_job(tmp_path / "in")


def put(*path: str | int, value: Any) -> Spoil:
    """Set one field of the job."""

    def spoil(job: Job, _folder: Path) -> None:
        *parents, leaf = path
        place: Any = job
        for parent in parents:
            place = place.setdefault(parent, {}) if isinstance(place, dict) else place[parent]
        place[leaf] = value

    return spoil


def without(*names: str) -> Spoil:
    """Take files out of the verifier's folder."""

    def spoil(job: Job, _folder: Path) -> None:
        for name in names:
            (Path(job["verifier"]["model"]) / name).unlink(missing_ok=True)

    return spoil


def without_template(job: Job, _folder: Path) -> None:
    folder = Path(job["verifier"]["model"])
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    place = folder / "tokenizer_config.json"
    config = json.loads(place.read_text())
    config.pop("chat_template", None)
    place.write_text(json.dumps(config))


def shallow(job: Job, folder: Path) -> None:
    job["verifier"]["model"] = str(tiny_verifier(folder / "shallow", layers=2))


def train_file(text: str) -> Spoil:
    def spoil(job: Job, _folder: Path) -> None:
        Path(job["datasets"][0]["uri"]).write_text(text)

    return spoil


def rows(*messages: list[dict[str, str]], regenerate: bool = True) -> Spoil:
    def spoil(job: Job, _folder: Path) -> None:
        write_jsonl(Path(job["datasets"][0]["uri"]), [{"messages": list(m)} for m in messages])
        job["data"]["regenerate"]["enabled"] = regenerate

    return spoil


def turn(role: str, content: str = "words and more words") -> dict[str, str]:
    return {"role": role, "content": content}


REFUSALS: dict[str, tuple[Spoil, str, str]] = {
    "an unknown field": (put("training", "bogus", value=1), "request.invalid", "/training/bogus"),
    "an unknown verifier path": (lambda j, f: j["verifier"].update(model=str(f / "nowhere")), "verifier.missing", "/verifier/model"),
    "a verifier without tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "verifier.tokenizer", "/verifier/model"),
    "a verifier without chat template": (without_template, "verifier.chat_template", "/verifier/model"),
    "a verifier without weights": (without("model.safetensors"), "verifier.weights", "/verifier/model"),
    "a verifier of two layers": (shallow, "verifier.layers", "/verifier/model"),
    "a relative path": (put("datasets", 0, "uri", value="in/no.jsonl"), "source.scheme", "/datasets/0/uri"),
    "a missing dataset": (lambda j, f: j["datasets"][0].update(uri=str(f / "no.jsonl")), "dataset.missing", "/datasets/0/uri"),
    "an empty dataset": (train_file(""), "dataset.empty", "/datasets/0/uri"),
    "a dataset that is not JSONL": (train_file("one,two\n3,4\n"), "dataset.not_jsonl", "/datasets/0/uri"),
    "wrong roles": (rows([turn("wizard"), turn("user")]), "dataset.roles", "/datasets/0/uri"),
    "no assistant turn": (rows([turn("user")], regenerate=False), "dataset.no_assistant", "/datasets/0/uri"),
    "draft_vocab_size 0": (put("vocab", "draft_vocab_size", value=0), "request.invalid", "/vocab/draft_vocab_size"),
    "draft_vocab_size below 0": (put("vocab", "draft_vocab_size", value=-5), "request.invalid", "/vocab/draft_vocab_size"),
    "draft_vocab_size above the vocabulary": (put("vocab", "draft_vocab_size", value=10**6), "vocab.size", "/vocab/draft_vocab_size"),
    "ttt_steps 0": (put("training", "ttt_steps", value=0), "request.invalid", "/training/ttt_steps"),
    "a learning rate that is no number": (put("training", "lr", value="NaN"), "request.invalid", "/training/lr"),
    "max_seq_len below every sample": (put("data", "max_seq_len", value=8), "data.too_short", "/data/max_seq_len"),
    "a file outside the roots": (put("datasets", 0, "uri", value="/etc/passwd"), "source.not_allowed", "/datasets/0/uri"),
    "a web address": (put("datasets", 0, "uri", value="http://127.0.0.1/x.jsonl"), "source.scheme", "/datasets/0/uri"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSALS))
def test_it_is_refused_with_code_field_and_remedy(name: str, client: TestClient, job: Job, tmp_path: Path):
    spoil, code, pointer = REFUSALS[name]
    spoil(job, tmp_path / "in")

    answer = client.post("/jobs", json=job)

    problem = answer.json()
    assert answer.headers["content-type"].startswith("application/problem+json")
    assert (problem["code"], problem["status"]) == (code, answer.status_code)
    assert 400 <= answer.status_code < 500
    assert problem["errors"][0]["pointer"] == pointer
    assert problem["remedy"]
    assert client.get("/jobs").json()["data"] == []


def test_a_number_that_json_cannot_hold_is_refused_at_its_field(client: TestClient, job: Job):
    body = json.dumps(job).replace('"lr": 0.001', '"lr": NaN')
    assert "NaN" in body

    answer = client.post("/jobs", content=body, headers={"content-type": "application/json"})

    assert (answer.status_code, answer.json()["code"]) == (422, "request.invalid")
    assert answer.json()["errors"][0]["pointer"] == "/training/lr"


def test_a_body_over_the_limit_is_refused(client: TestClient, job: Job):
    answer = client.post("/jobs", json={**job, "metadata": {"x": "y" * 70_000}})

    assert (answer.status_code, answer.json()["code"]) == (413, "request.too_large")
    assert answer.json()["remedy"]


def test_a_drafter_name_in_use_is_refused(client: TestClient, job: Job):
    assert client.post("/jobs", json=job).status_code == 202

    answer = client.post("/jobs", json=job)

    assert (answer.status_code, answer.json()["code"]) == (409, "drafter.name_in_use")
    assert answer.json()["errors"][0]["pointer"] == "/name"
    assert answer.json()["remedy"]


def test_the_unspoiled_job_is_taken(client: TestClient, job: Job):
    assert client.post("/jobs", json=job).status_code == 202


def test_text_that_cannot_be_sent_leaves_no_row_that_breaks_the_list(client: TestClient, job: Job):
    body = json.dumps({**job, "metadata": {"x": "\ud800"}})

    answer = client.post("/jobs", content=body, headers={"content-type": "application/json"})

    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/metadata/x")
    assert client.get("/jobs").json()["data"] == []


def test_an_origin_that_is_no_url_is_foreign(client: TestClient, job: Job):
    answer = client.post("/jobs", json=job, headers={"Origin": "http://[evil"})

    assert (answer.status_code, answer.json()["code"]) == (403, "request.origin")
