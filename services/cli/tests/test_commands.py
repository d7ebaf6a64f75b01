"""Commands against a real API: what they print, and the exit status that a script sees."""

import json
import re
import shutil
from pathlib import Path

import pytest
import typer
from inspected_files import CONTRACT, write_shard

from aerie_cli.main import app
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import UnitWriter


def write(folder, job) -> str:
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return str(path)


def test_a_posted_job_is_shown_by_status_and_listed(aerie, named, tmp_path):
    posted = aerie.json("submit", write(tmp_path, named))

    assert aerie.json("status", posted["id"])["name"] == named["name"]
    assert posted["id"] in [job["id"] for job in aerie.json("status")["data"]]
    assert "no worker is there yet" in aerie("status", posted["id"]).stdout


def test_a_job_comes_from_stdin_with_changes(aerie, named):
    posted = aerie.json("submit", "-", "--set", "training.epochs=7", stdin=json.dumps(named))

    assert posted["spec"]["training"]["epochs"] == 7


def test_the_same_key_posts_the_same_job_once(aerie, named, tmp_path):
    first, second = (
        aerie.json("submit", write(tmp_path, named), "--idempotency-key", f"key-{named['name']}") for _ in range(2)
    )

    assert first["id"] == second["id"]


def test_a_plan_says_which_units_would_run_and_stores_nothing(aerie, named, tmp_path):
    planned = aerie.json("plan", write(tmp_path, named))

    assert [stage["name"] for stage in planned["stages"]][:2] == ["prepare", "canary"]
    assert named["name"] not in [job["name"] for job in aerie.json("status")["data"]]


@pytest.mark.parametrize(
    ("change", "code", "pointer"),
    [
        ("training.ttt_steps=0", "request.invalid", "/training/ttt_steps"),
        ("training.lr=.nan", "request.invalid", "/training/lr"),
        ("no_such_field=1", "request.invalid", "/no_such_field"),
        ("vocab.draft_vocab_size=0", "request.invalid", "/vocab/draft_vocab_size"),
        ("verifier.model=/nowhere", None, "/verifier/model"),
    ],
)
def test_an_invalid_job_is_refused_with_field_and_remedy_and_status_2(aerie, named, tmp_path, change, code, pointer):
    refused = aerie("submit", write(tmp_path, named), "--set", change, "--json")

    problem = json.loads(refused.stdout)
    assert refused.exit_code == 2
    assert code in (None, problem["code"])
    assert problem["errors"][0]["pointer"] == pointer
    assert problem["remedy"]


def test_for_people_an_error_goes_to_stderr_and_names_the_field(aerie, named, tmp_path):
    refused = aerie("submit", write(tmp_path, named), "--set", "training.ttt_steps=0")

    assert refused.stdout == ""
    assert "request.invalid (at /training/ttt_steps)" in refused.stderr
    assert "remedy: " in refused.stderr


def test_a_name_in_use_is_refused_with_status_2(aerie, named, tmp_path):
    aerie("submit", write(tmp_path, named))

    again = aerie("submit", write(tmp_path, named), "--json")

    assert (again.exit_code, json.loads(again.stdout)["code"]) == (2, "drafter.name_in_use")


def test_a_job_is_cancelled_and_taken_up_again(aerie, named, tmp_path):
    posted = aerie.json("submit", write(tmp_path, named))

    assert aerie.json("cancel", posted["id"])["status"] == "cancelled"
    assert aerie.json("retry", posted["id"])["status"] == "queued"
    assert aerie("retry", posted["id"]).exit_code == 2


def test_a_job_is_paused_and_goes_on(aerie, named, tmp_path):
    posted = aerie.json("submit", write(tmp_path, named))

    assert aerie.json("pause", posted["id"])["status"] == "paused"
    assert "aerie resume" in aerie.json("status", posted["id"])["reason"]["remedy"]
    assert aerie.json("resume", posted["id"])["status"] == "queued"


def test_watching_a_cancelled_job_ends_at_once_with_status_1(aerie, named, tmp_path):
    posted = aerie.json("submit", write(tmp_path, named))
    aerie("cancel", posted["id"])

    watched = aerie("watch", posted["id"], "--json")

    assert watched.exit_code == 1
    assert json.loads(watched.stdout)["status"] == "cancelled"


def test_inspecting_a_job_shows_its_events_and_its_spec(aerie, named, tmp_path):
    posted = aerie.json("submit", write(tmp_path, named))

    shown = aerie.json("inspect", "job", posted["id"])

    assert shown["events"][0]["type"] == "job.created"
    assert shown["attempts"] == shown["artifacts"] == []
    text = aerie("inspect", "job", posted["id"]).stdout
    assert text.index("prepare") < text.index("taken") < text.index('"max_seq_len": 96')


def test_a_job_is_inspected_by_a_name_that_only_one_job_has(aerie, named, tmp_path):
    first = aerie.json("submit", write(tmp_path, named))

    assert aerie.json("inspect", "job", named["name"])["job"]["id"] == first["id"]

    aerie("cancel", first["id"])
    second = aerie.json("submit", write(tmp_path, named))
    refused = aerie("inspect", "job", named["name"], "--json")

    assert refused.exit_code == 2
    assert {first["id"], second["id"]} <= set(re.findall(r"job_\w+", json.loads(refused.stdout)["detail"]))
    assert aerie("inspect", "job", "nobody").exit_code != 0


def test_inspecting_a_job_shows_what_it_trains_on_in_words(aerie, named, tmp_path):
    posted = aerie.json("submit", write(tmp_path, named))
    shard = write_shard(tmp_path / "shard-00000.safetensors")
    store = LocalStore(tmp_path / "house/objects")
    writer = UnitWriter(store, tenant="t", job_id=posted["id"], stage="extract", unit=(0, 0, 2), unit_key="k", fence=1)
    counts = {"samples": 2, "tokens": 8, "supervised_tokens": 2, "final_states": 3}
    writer.add_file(shard.name, shard, **counts)
    writer.commit({}, contract={**CONTRACT, "vocab_size": 320})
    asked = ("inspect", "job", posted["id"], "--dir", str(tmp_path / "house"))

    shown, text = aerie.json(*asked), aerie(*asked).stdout

    assert [[span["supervised"] for span in sample["spans"]] for sample in shown["samples"]] == [[False, True], [False]]
    assert shown["samples"][0]["spans"][1]["text"].endswith("<|im_end|>")
    assert "the states were captured with tokenizer t" in shown["samples_remark"]
    assert "--- a (code): 5 tokens, 2 supervised" in text


def test_a_verifier_posted_as_a_uri_is_found_for_the_words(aerie, named, tmp_path):
    model = Path(named["verifier"]["model"])
    spaced = shutil.copytree(model, model.parent / "a b")
    posted = aerie.json(
        "submit", write(tmp_path, {**named, "verifier": {**named["verifier"], "model": spaced.as_uri()}})
    )
    store = LocalStore(tmp_path / "house/objects")
    writer = UnitWriter(store, tenant="t", job_id=posted["id"], stage="extract", unit=(0, 0, 2), unit_key="k", fence=1)
    shard = write_shard(tmp_path / "shard-00000.safetensors")
    writer.add_file(shard.name, shard, samples=2, tokens=8, supervised_tokens=2, final_states=3)
    manifest = store.root / writer.commit({}, contract={**CONTRACT, "vocab_size": 320}).key

    of_job = aerie.json("inspect", "job", posted["id"], "--dir", str(tmp_path / "house"))
    of_shard = aerie.json("inspect", "shard", str(manifest))

    assert f"{spaced} has" in of_job["samples_remark"]
    assert f"{spaced} has" in of_shard["warning"]


def test_a_job_whose_states_lie_elsewhere_is_inspected_without_samples_and_says_so(aerie, named, tmp_path):
    posted = aerie.json("submit", write(tmp_path, named))

    shown = aerie.json("inspect", "job", posted["id"], "--dir", str(tmp_path))

    assert shown["samples"] is None
    assert "holds no hidden states of this job" in shown["samples_remark"]


def test_the_logs_of_a_job_that_did_not_start_are_empty(aerie, named, tmp_path):
    posted = aerie.json("submit", write(tmp_path, named))

    assert aerie.json("logs", posted["id"])["data"] == []


@pytest.mark.parametrize("command", ["status", "watch", "logs", "cancel", "retry", "pause", "resume"])
def test_a_job_that_does_not_exist_is_an_invalid_request(aerie, command):
    asked = aerie(command, "job_none", "--json")

    assert (asked.exit_code, json.loads(asked.stdout)["code"]) == (2, "job.missing")


def test_without_an_api_the_exit_status_is_4_and_the_remedy_is_to_start_one(aerie, tmp_path, monkeypatch):
    aerie = type(aerie)("")  # an empty AERIE_URL names none

    asked = aerie("status", "--dir", str(tmp_path))

    assert asked.exit_code == 4
    assert f"aerie up --dir {tmp_path}" in asked.stderr


def test_an_address_where_nobody_answers_is_status_4(aerie):
    asked = aerie("status", "--url", "http://127.0.0.1:9", "--json")

    assert (asked.exit_code, json.loads(asked.stdout)["code"]) == (4, "api.unreachable")


def test_wrong_usage_is_status_2(aerie):
    assert aerie("status", "--no-such-option").exit_code == 2
    assert aerie("submit").exit_code == 2


def test_the_house_in_a_folder_is_found_by_its_file(aerie, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/server.json").write_text(json.dumps({"url": aerie.url, "pid": 1}))
    by_folder = type(aerie)("")

    assert by_folder("status", "--dir", str(tmp_path)).exit_code == 0


def test_every_command_documents_itself(aerie):
    told, commands = aerie("--help").stdout, typer.main.get_command(app).commands

    assert {"submit", "download", "keys", "bench", "support-bundle"} <= set(commands)
    for name, command in commands.items():
        assert name in told
        assert command.help
        assert aerie(name, "--help").exit_code == 0
