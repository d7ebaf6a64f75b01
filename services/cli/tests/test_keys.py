"""`aerie keys` against a real API: whoever made a key can use it until it is ended."""

import json


def test_a_key_is_made_replaced_and_ended_and_its_secret_shown_once(aerie):
    made = aerie("keys", "create", "ci", "--scope", "jobs:read", "--expires-in", "3600")
    text = made.stdout.strip()
    assert made.exit_code == 0
    assert text.startswith("aerie_")
    key = text.split("_")[1]
    listed = aerie("keys", "list").stdout
    assert key in listed
    assert text not in listed
    fresh = aerie.json("keys", "rotate", key, "--overlap", "0")
    assert (fresh["name"], fresh["scopes"]) == ("ci", ["jobs:read"])
    assert aerie.json("keys", "revoke", fresh["id"])["revoked_at"] is not None


def test_what_is_no_key_is_refused_with_status_2(aerie):
    refused = aerie("keys", "revoke", "../jobs", "--json")
    assert (refused.exit_code, json.loads(refused.stdout)["code"]) == (2, "request.invalid")
    assert aerie("keys", "create", "x", "--scope", "root").exit_code == 2


def test_the_key_of_the_environment_is_sent(aerie, monkeypatch, tmp_path):
    monkeypatch.setenv("AERIE_API_KEY", "aerie_wrong")
    assert json.loads(aerie("status", "--json").stdout)["code"] == "auth.key"
    monkeypatch.delenv("AERIE_API_KEY")
    file = tmp_path / "key"
    file.write_text(aerie("keys", "create", "file", "--scope", "jobs:read").stdout)
    monkeypatch.setenv("AERIE_API_KEY_FILE", str(file))
    assert aerie("status", "--json").exit_code == 0
    assert json.loads(aerie("keys", "list", "--json").stdout)["code"] == "auth.scope"
    file.unlink()
    assert json.loads(aerie("status", "--json").stdout)["code"] == "api.key_file"
