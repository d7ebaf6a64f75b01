"""What cannot succeed is refused when it is posted: a stable code, the field, the remedy, and no row in the database.

The API is the real one, over the real preflight in its confined processes and a real (tiny) verifier folder.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from aerie_api.app import create_app
from aerie_api.house import Parts
from aerie_api.settings import Settings
from eagle3_core.jobs.inspection import Inspection
from eagle3_core.testing import tiny_conversations, tiny_job, tiny_tokenizer, tiny_verifier, write_jsonl

Job = dict[str, Any]
Spoil = Callable[[Job, Path], None]


@pytest.fixture(scope="module")
def inspection() -> Iterator[Inspection]:
    """One pool of confined processes for all tests here; a second of CPU time is plenty for tiny verifiers."""
    pool = Inspection(cpu_s=2.0, memory_bytes=1 << 30, parallel=1)
    yield pool
    pool.close()


@pytest.fixture
def client(tmp_path: Path, inspection: Inspection) -> Iterator[TestClient]:
    settings = Settings(
        run_dir=tmp_path / "run", data_dir=tmp_path / "data", file_roots=(tmp_path / "in",), max_body_bytes=65536
    )
    app = create_app(settings, Parts(preflight=inspection))
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as http:
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


def all_masked(job: Job, _folder: Path) -> None:
    """Answers are given, and the template shows none of them as it prompts for them."""
    write_jsonl(Path(job["datasets"][0]["uri"]), tiny_conversations(4, answered=True))
    job["data"]["regenerate"]["enabled"] = False
    place = Path(job["verifier"]["model"]) / "chat_template.jinja"
    place.write_text(place.read_text() + "{% if add_generation_prompt %}{{ '<think>' }}{% endif %}")


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


def config(**fields: Any) -> Spoil:
    """Change fields of the verifier's config.json."""

    def spoil(job: Job, _folder: Path) -> None:
        place = Path(job["verifier"]["model"]) / "config.json"
        place.write_text(json.dumps({**json.loads(place.read_text()), **fields}))

    return spoil


def template(source: str) -> Spoil:
    """Put `source` in front of the verifier's chat template."""

    def spoil(job: Job, _folder: Path) -> None:
        place = Path(job["verifier"]["model"]) / "chat_template.jinja"
        place.write_text(source + place.read_text())

    return spoil


def special(make: Callable[[Path], object]) -> Spoil:
    """A data set that `make` puts at a path of its own."""

    def spoil(job: Job, folder: Path) -> None:
        make(folder / "odd")
        job["datasets"][0]["uri"] = str(folder / "odd")

    return spoil


def link_out(job: Job, folder: Path) -> None:
    (Path(job["verifier"]["model"]) / "added_tokens.json").symlink_to("/etc/passwd")


def larger_tokenizer(job: Job, _folder: Path) -> None:
    tiny_tokenizer(400).save(str(Path(job["verifier"]["model"]) / "tokenizer.json"))


def regex_bomb(job: Job, _folder: Path) -> None:
    place = Path(job["verifier"]["model"]) / "tokenizer.json"
    tokenizer = json.loads(place.read_text())
    ten = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 10}
    place.write_text(json.dumps({**tokenizer, "normalizer": {"type": "Sequence", "normalizers": [ten] * 9}}))


def bytes_of(content: bytes) -> Spoil:
    return special(lambda path: path.write_bytes(content))


def same_questions(job: Job, _folder: Path) -> None:
    asks = [row["messages"][0]["content"].upper() for row in tiny_conversations(12)]
    write_jsonl(Path(job["evaluation"]["prompts"][0]["uri"]), [{"prompt": ask} for ask in asks])


def zipped(job: Job, folder: Path) -> None:
    with zipfile.ZipFile(folder / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("train.jsonl", b"a" * 50_000_000)
    job["datasets"][0]["uri"] = str(folder / "bomb.zip")


def vast(name: str) -> Spoil:
    """Make a file of the verifier one of terabytes that takes no disk."""

    def spoil(job: Job, _folder: Path) -> None:
        os.truncate(Path(job["verifier"]["model"]) / name, 1 << 42)

    return spoil


PARQUET = b"PAR1" + b"\xff" * 999 + struct.pack("<I", 0xFFFFFFFF) + b"PAR1"
"""Whose footer claims 4 GiB."""
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(x={}) %}{% for i in range(99) %}{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}{{ n.x }}"

REFUSALS: dict[str, tuple[Spoil, str, str]] = {
    "an unknown field": (put("training", "bogus", value=1), "request.invalid", "/training/bogus"),
    "an unknown verifier path": (lambda j, f: j["verifier"].update(model=str(f / "nowhere")), "verifier.missing", "/verifier/model"),
    "a verifier without tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "verifier.tokenizer", "/verifier/model"),
    "a verifier without chat template": (without_template, "verifier.chat_template", "/verifier/model"),
    "a verifier without weights": (without("model.safetensors"), "verifier.weights", "/verifier/model"),
    "a verifier of two layers": (shallow, "verifier.layers", "/verifier/model"),
    "a verifier of another width": (config(hidden_size=64), "verifier.mismatch", "/verifier/model"),
    "a verifier cut short": (config(num_hidden_layers=7), "verifier.mismatch", "/verifier/model"),
    "a tokenizer of a larger model": (larger_tokenizer, "verifier.mismatch", "/verifier/model"),
    "a head that is tied and is not": (config(tie_word_embeddings=True), "verifier.mismatch", "/verifier/model"),
    "true where a size belongs": (config(num_hidden_layers=True), "verifier.config", "/verifier/model"),
    "an end outside the vocabulary": (config(eos_token_id=320), "verifier.config", "/verifier/model"),
    "an end that is true": (config(eos_token_id=True), "verifier.config", "/verifier/model"),
    "a type that nobody knows": (config(model_type="llamas"), "verifier.unsupported", "/verifier/model"),
    "a type without a drafter": (config(model_type="gpt_oss"), "verifier.unsupported", "/verifier/model"),
    "a quantised verifier": (config(quantization_config={"quant_method": "fp8"}), "verifier.unsupported", "/verifier/model"),
    "a verifier whose RoPE changes": (config(rope_parameters={"rope_type": "dynamic"}), "drafter.verifier", "/verifier/model"),
    "a verifier whose logits are capped": (config(final_logit_softcapping=30.0), "drafter.verifier", "/verifier/model"),
    "a verifier with a link out of the roots": (link_out, "source.not_allowed", "/verifier/model"),
    "a name longer than any": (lambda j, f: j["verifier"].update(model=f"{f}/{'a' * 300}"), "verifier.missing", "/verifier/model"),
    "a template that loops": (template(LOOPS), "preflight.unanswered", "/verifier/model"),
    "a template that doubles": (template(DOUBLES), "preflight.unanswered", "/verifier/model"),
    "a template that multiplies text": (template("{{ 'x' * 10**9 }}"), "preflight.unanswered", "/verifier/model"),
    "a template that never returns": (template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "dataset.format", "/datasets"),
    "a tokenizer that multiplies text": (regex_bomb, "preflight.unanswered", "/verifier/model"),
    "a relative path": (put("datasets", 0, "uri", value="in/no.jsonl"), "source.scheme", "/datasets/0/uri"),
    "a missing dataset": (lambda j, f: j["datasets"][0].update(uri=str(f / "no.jsonl")), "dataset.missing", "/datasets/0/uri"),
    "an empty dataset": (train_file(""), "dataset.empty", "/datasets/0/uri"),
    "a dataset that is not JSONL": (train_file("one,two\n3,4\n"), "dataset.not_jsonl", "/datasets/0/uri"),
    "wrong roles": (rows([turn("wizard"), turn("user")]), "dataset.roles", "/datasets/0/uri"),
    "no assistant turn": (rows([turn("user")], regenerate=False), "dataset.no_assistant", "/datasets/0/uri"),
    "masks of zeros alone": (all_masked, "data.all_masked", "/datasets"),
    "draft_vocab_size 0": (put("vocab", "draft_vocab_size", value=0), "request.invalid", "/vocab/draft_vocab_size"),
    "draft_vocab_size below 0": (put("vocab", "draft_vocab_size", value=-5), "request.invalid", "/vocab/draft_vocab_size"),
    "draft_vocab_size 1": (put("vocab", "draft_vocab_size", value=1), "vocab.size", "/vocab/draft_vocab_size"),
    "draft_vocab_size above the vocabulary": (put("vocab", "draft_vocab_size", value=10**6), "vocab.size", "/vocab/draft_vocab_size"),
    "ttt_steps 0": (put("training", "ttt_steps", value=0), "request.invalid", "/training/ttt_steps"),
    "a learning rate that is no number": (put("training", "lr", value="NaN"), "request.invalid", "/training/lr"),
    "max_seq_len below every sample": (put("data", "max_seq_len", value=8), "data.too_short", "/data/max_seq_len"),
    "a line of 5 MB": (bytes_of(b'{"prompt": "' + b"a" * 5_000_000 + b'"}'), "dataset.line_too_long", "/datasets/0/uri"),
    "a line of terabytes": (special(lambda p: (p.touch(), os.truncate(p, 1 << 42))), "dataset.line_too_long", "/datasets/0/uri"),
    "a bomb in gzip": (bytes_of(gzip.compress(b"a" * 100_000_000)), "dataset.line_too_long", "/datasets/0/uri"),
    "a bomb in gzip in gzip": (bytes_of(gzip.compress(gzip.compress(b"a" * 100_000_000))), "dataset.not_jsonl", "/datasets/0/uri"),
    "a bomb in zip": (zipped, "dataset.not_jsonl", "/datasets/0/uri"),
    "a file of Parquet": (bytes_of(PARQUET), "dataset.not_jsonl", "/datasets/0/uri"),
    "a config of terabytes": (vast("config.json"), "verifier.config", "/verifier/model"),
    "a tokenizer of terabytes": (vast("tokenizer.json"), "verifier.tokenizer", "/verifier/model"),
    "weights with terabytes that nobody names": (vast("model.safetensors"), "verifier.weights", "/verifier/model"),
    "half a gzip file": (bytes_of(gzip.compress(b'{"prompt": "a"}\n' * 99)[:-9]), "dataset.format", "/datasets/0/uri"),
    "a thousand and one turns": (rows([turn(("user", "assistant")[i % 2]) for i in range(1001)]), "dataset.format", "/datasets/0/uri"),
    "a dataset in UTF-16": (bytes_of('{"prompt": "a"}\n'.encode("utf-16")), "dataset.not_jsonl", "/datasets/0/uri"),
    "a folder as dataset": (special(Path.mkdir), "dataset.missing", "/datasets/0/uri"),
    "a pipe as dataset": (special(os.mkfifo), "dataset.missing", "/datasets/0/uri"),
    "a link to a device": (special(lambda p: p.symlink_to("/dev/zero")), "source.not_allowed", "/datasets/0/uri"),
    "a link to a process's secrets": (special(lambda p: p.symlink_to("/proc/self/environ")), "source.not_allowed", "/datasets/0/uri"),
    "a link to itself": (special(lambda p: p.symlink_to(p)), "dataset.missing", "/datasets/0/uri"),
    "a way out in percents": (lambda j, f: j["datasets"][0].update(uri=f"file://{f}/%2e%2e/x"), "source.not_allowed", "/datasets/0/uri"),
    "a path that is no text": (lambda j, f: j["datasets"][0].update(uri=f"file://{f}/%ff.jsonl"), "dataset.missing", "/datasets/0/uri"),
    "a NUL in a path": (lambda j, f: j["datasets"][0].update(uri=f"file://{f}/%00"), "source.scheme", "/datasets/0/uri"),
    "a weight of 0": (put("datasets", 0, "weight", value=0), "request.invalid", "/datasets/0/weight"),
    "a weight that is no number": (put("datasets", 0, "weight", value="nan"), "request.invalid", "/datasets/0/weight"),
    "a weight below 0": (put("datasets", 0, "weight", value=-1), "request.invalid", "/datasets/0/weight"),
    "training on longer samples than there are": (put("training", "max_seq_len", value=97), "request.invalid", "/training/max_seq_len"),
    "sampled answers": (put("data", "regenerate", "temperature", value=0.7), "request.invalid", "/data/regenerate/temperature"),
    "likely tokens without samples": (put("data", "regenerate", "top_p", value=0.9), "request.invalid", "/data/regenerate/top_p"),
    "GPUs for a job on the CPU": (put("training", "gpus", value=1), "request.invalid", "/training/gpus"),
    "a key in a job": (put("verifier", "endpoint", value={"url": "http://a", "token": "x"}), "request.invalid", "/verifier/endpoint/token"),
    "an odd endpoint": (put("verifier", "endpoint", value={"url": "gopher://x"}), "request.invalid", "/verifier/endpoint/url"),
    "a split verifier without an engine": (put("verifier", "tensor_parallel", value=2), "request.invalid", "/verifier/tensor_parallel"),
    "layers that do not rise": (put("extraction", "aux_layers", value=[5, 3, 1]), "request.invalid", "/extraction/aux_layers"),
    "tools in a template": (put("data", "template_arguments", "tools", value=1), "request.invalid", "/data/template_arguments/tools"),
    "a thousand datasets": (lambda j, f: j.update(datasets=[{"uri": "/a"}] * 1000), "request.invalid", "/datasets"),
    "true epochs": (put("training", "epochs", value=True), "request.invalid", "/training/epochs"),
    "epochs without end": (put("training", "epochs", value=10**30), "request.invalid", "/training/epochs"),
    "the same questions in capitals": (same_questions, "evaluation.overlap", "/evaluation/prompts"),
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
    assert "Value error" not in answer.text  # pydantic's words before a sentence of ours
    assert client.get("/jobs").json()["data"] == []


PLACES: dict[str, Callable[[Job, str], object]] = {
    "/datasets/0/uri": lambda job, uri: job["datasets"][0].update(uri=uri),
    "/evaluation/prompts/0/uri": lambda job, uri: job["evaluation"]["prompts"][0].update(uri=uri),
    "/verifier/model": lambda job, uri: job["verifier"].update(model=uri),
}
ELSEWHERE = ("http://127.0.0.1:{port}/x.jsonl", "//127.0.0.1:{port}/x")
"""Every other spelling is refused in the same place, without a look: see test_sources.py."""


@pytest.mark.parametrize("pointer", PLACES)
def test_no_address_in_a_job_makes_the_api_call_anybody(pointer: str, client: TestClient, job: Job):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for form in ELSEWHERE:
            uri = form.format(port=listener.getsockname()[1])
            PLACES[pointer](job, uri)
            refused = client.post("/jobs", json=job)
            assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, pointer), (uri, refused.text)
            assert refused.json()["code"] in ("source.scheme", "source.not_allowed"), uri
        with pytest.raises(BlockingIOError):  # nobody knocked
            listener.accept()


def test_others_are_served_while_a_costly_job_is_looked_at(client: TestClient, job: Job, tmp_path: Path):
    template(LOOPS)(job, tmp_path)
    with ThreadPoolExecutor(1) as beside:
        looked_at = beside.submit(client.post, "/jobs", json=job)
        served = 0
        while not looked_at.done():
            assert client.get("/healthz").status_code == 200
            served += 1

    assert looked_at.result().json()["code"] == "preflight.unanswered"
    assert served > 2  # before the answer, and not only behind it


def test_more_jobs_than_can_be_looked_at_are_told_to_come_back(tmp_path: Path, job: Job):
    pool = Inspection(cpu_s=2.0, memory_bytes=1 << 30, parallel=1, waiting=0)
    settings = Settings(run_dir=tmp_path / "run", data_dir=tmp_path / "data", file_roots=(tmp_path / "in",))
    template(LOOPS)(job, tmp_path)
    with (
        closing(pool), ThreadPoolExecutor(4) as many,
        TestClient(create_app(settings, Parts(preflight=pool)), base_url="http://127.0.0.1:8000") as http,
    ):  # fmt: skip
        answers = [a.result() for a in [many.submit(http.post, "/jobs:plan", json=job) for _ in range(4)]]

    told = Counter(answer.json()["code"] for answer in answers)
    assert (told["preflight.unanswered"], told["preflight.busy"]) == (1, 3)
    assert {a.headers["retry-after"] for a in answers if a.status_code == 503} == {"2"}


def test_a_fault_of_ours_is_not_blamed_on_the_job(client: TestClient, job: Job, monkeypatch, inspection: Inspection):
    monkeypatch.setattr(inspection._all[0], "ask", lambda _: 1 // 0)

    answer = client.post("/jobs", json=job)

    assert (answer.status_code, answer.json()["code"]) == (500, "internal")


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
