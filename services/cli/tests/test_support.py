"""The bundle for support: what is in it, and what never is."""

import json
import stat
import zipfile
from pathlib import Path

import pytest
import typer.main

from aerie_cli.main import app

URL_PASSWORD, FILE_PASSWORD = "planted-in-a-url", "planted%2Fin-a-file"
PLANTED = {
    "a variable": "planted-in-a-variable", "another service's variable": "planted-for-the-cloud",
    "a URL": URL_PASSWORD, "a file that a variable names": FILE_PASSWORD, "the same, decoded": "planted/in-a-file",
    "the fleet's token": "planted-as-worker-token", "the admin key": "aerie_" + "0" * 16 + "_" + "p" * 43,
    "a job's metadata": "planted-in-metadata", "a log line": "planted-as-bearer-token",
}  # fmt: skip


def contents(bundle: Path) -> dict[str, str]:
    with zipfile.ZipFile(bundle) as opened:
        return {name: opened.read(name).decode() for name in opened.namelist()}


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A house's folder with secrets in every corner, and an environment that names more."""
    folder = tmp_path / "house"
    (folder / "run").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "run/worker.token").write_text(PLANTED["the fleet's token"] + "\n")
    (folder / "run/admin.key").write_text(PLANTED["the admin key"] + "\n")
    broker = tmp_path / "broker.url"
    broker.write_text(f"rediss://:{FILE_PASSWORD}@redis:6379/0\n")
    token, cloud = PLANTED["the fleet's token"], PLANTED["another service's variable"]
    lines = [
        f"GET /x Authorization: Bearer {PLANTED['a log line']}",
        f"claimed with {token} and {cloud}",
        f"connecting to postgresql://aerie:{URL_PASSWORD}@db/aerie and with {PLANTED['the same, decoded']}",
        f"key {PLANTED['the admin key']}: the last words of the worker",
    ]
    (folder / "logs/worker-1.log").write_text("\n".join(lines) + "\n")
    for name, value in {
        "AERIE_API_KEY_FILE": str(folder / "run/admin.key"), "AERIE_BROKER_URL_FILE": str(broker),
        "AERIE_DATABASE_URL": f"postgresql://aerie:{URL_PASSWORD}@db/aerie", "AERIE_LEASE_S": "45",
        "HF_TOKEN": PLANTED["a variable"], "AWS_SECRET_ACCESS_KEY": PLANTED["another service's variable"],
        "SOME_PROGRAM_SETTING": "not told",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return folder


def test_secrets_that_are_planted_everywhere_are_nowhere_in_the_bundle(aerie, named, house, tmp_path, monkeypatch):
    posted = {**named, "metadata": {"wandb_api_key": PLANTED["a job's metadata"], "note": "kept for support"}}
    place = tmp_path / "job.json"
    place.write_text(json.dumps(posted))
    monkeypatch.delenv("AERIE_API_KEY_FILE")
    job = aerie.json("submit", str(place))["id"]

    made = aerie.json("support-bundle", job, "--dir", str(house), "--out", str(tmp_path / "b.zip"))

    found = contents(tmp_path / "b.zip")
    whole = "\n".join(found.values())
    assert sorted(made["files"]) == sorted(found)
    assert [what for what, secret in PLANTED.items() if secret in whole] == []
    assert "the last words of the worker" in found["logs/worker-1.log"]
    assert json.loads(found["api/job.json"])["id"] == job
    assert "kept for support" in whole
    assert json.loads(found["api/job-events.json"])[0]["type"] == "job.created"
    assert json.loads(found["api/readyz.json"])["status"] == "ready"
    settings = json.loads(found["settings.json"])
    assert settings["set"]["AERIE_LEASE_S"] == "45"
    assert "SOME_PROGRAM_SETTING" in settings["also_set"]
    assert "not told" not in whole
    assert json.loads(found["about.json"])["versions"]["aerie_cli"]
    assert not [name for name in found if name.endswith(".missing.txt")]


def test_a_bundle_is_private_and_replaces_no_file(offline, house, tmp_path):
    place = tmp_path / "b.zip"
    assert offline("support-bundle", "--dir", str(house), "--out", str(place)).exit_code == 0
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    again = offline("support-bundle", "--dir", str(house), "--out", str(place))
    assert again.exit_code != 0
    assert "support.file" in again.stderr


def test_an_api_that_is_away_is_said_and_the_rest_is_gathered(offline, house, tmp_path):
    result = offline("support-bundle", "--dir", str(house), "--out", str(tmp_path / "b.zip"))

    assert result.exit_code == 0
    found = contents(tmp_path / "b.zip")
    assert "no API is running" in found["api/address.txt.missing.txt"]
    assert "the last words of the worker" in found["logs/worker-1.log"]


def test_a_long_log_is_cut_at_a_line(offline, house, tmp_path):
    (house / "logs/api.log").write_text("".join(f"line {i} {'x' * 100}\n" for i in range(20_000)))
    offline("support-bundle", "--dir", str(house), "--out", str(tmp_path / "b.zip"))

    lines = contents(tmp_path / "b.zip")["logs/api.log"].splitlines()
    assert len(lines) < 20_000
    assert lines[0].startswith("line ")
    assert lines[-1].startswith("line 19999 ")


def test_no_command_takes_a_secret_as_an_argument():
    """Arguments can be read by everybody on the machine: secrets come from the environment, a file or stdin."""
    taking, left = [], [typer.main.get_command(app)]
    while left:
        found = left.pop()
        left += list(getattr(found, "commands", {}).values())
        taking += [
            f"{found.name} {option}" for parameter in found.params for option in parameter.opts
            if any(word in option.lower() for word in ("token", "secret", "password", "api-key", "credential"))
        ]  # fmt: skip
    assert taking == []
