"""`aerie keys` against a real API: whoever made a key can use it until it is ended."""

import json
from contextlib import nullcontext

import pytest

from aerie_cli.client import check_transport, find_key, find_url
from eagle3_core.addresses import PlainHttpRefused


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


@pytest.fixture
def house(tmp_path, monkeypatch):
    """The folder of a house that asks for keys."""
    for name in ("AERIE_API_KEY", "AERIE_API_KEY_FILE", "AERIE_URL", "AERIE_ALLOW_PLAIN_HTTP"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/server.json").write_text('{"url": "http://127.0.0.1:8123"}')
    (tmp_path / "run/admin.key").write_text("the house's\n")
    return tmp_path


def test_the_key_of_a_house_is_sent_to_that_house_only(house, monkeypatch):
    assert find_key(find_url(None, house), house) == "the house's"
    assert find_key("https://127.0.0.1:8123", house) is None
    assert find_key("https://api.example", house) is None
    monkeypatch.setenv("AERIE_API_KEY", "mine\n")
    assert find_key("https://api.example", house) == "mine"


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://127.0.0.1:80", True), ("http://localhost", True), ("http://[::1]:80", True), ("https://api.example", True),
        ("http://api.example", False), ("http://10.0.0.1", False), ("http://127.0.0.1.example", False),
    ],
)  # fmt: skip
def test_a_key_crosses_no_network_in_clear_text(house, monkeypatch, url, allowed):
    check_transport(url, None)
    with nullcontext() if allowed else pytest.raises(PlainHttpRefused, match="not encrypted"):
        check_transport(url, "key")
    monkeypatch.setenv("AERIE_ALLOW_PLAIN_HTTP", "1")
    check_transport(url, "key")
