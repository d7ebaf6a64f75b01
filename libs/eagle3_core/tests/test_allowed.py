"""Which running servers a job may name, and with which keys, is the operator's to say: nothing is sent before it is asked."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.addresses import MetadataServiceRefused, PlainHttpRefused, require_no_metadata_service
from eagle3_core.engine.allowed import EndpointKeyRefused, EndpointNotAllowed, endpoints_of, read_allowed
from eagle3_core.engine.settings import BadEngineSettings
from eagle3_core.errors import InvalidRequest
from eagle3_core.jobs.graph import STAGES, Slice, StageName, queue_of, unit_key
from eagle3_core.jobs.spec import ServerAddress, parse_job
from eagle3_core.testing import tiny_job

AT = "/verifier/endpoint"


def settings(tmp_path: Path, url: str = "https://b", **entry: Any) -> dict[str, str]:
    (tmp_path / "key").write_text("the-key-of-b-0123456789\n")
    keys = {"prod": {"file": str(tmp_path / "key"), "endpoint": url, **entry}}
    return {"AERIE_ENDPOINTS": f"http://10.0.0.7:30000/ {url}", "AERIE_ENDPOINT_KEYS": json.dumps(keys)}


def test_only_servers_that_the_operator_lists_may_be_named_to_the_letter(tmp_path: Path) -> None:
    allowed = read_allowed(settings(tmp_path))

    assert allowed.client(ServerAddress(url="http://10.0.0.7:30000"), "t", AT).url == "http://10.0.0.7:30000"
    for other in ("http://169.254.169.254", "http://10.0.0.7:30001", "https://b.evil", "https://b/v1", "http://b"):
        with pytest.raises(EndpointNotAllowed, match="none of the servers") as caught:
            allowed.client(ServerAddress(url=other), "t", AT)
        assert caught.value.pointer == "/verifier/endpoint/url"


def test_without_settings_no_server_may_be_named() -> None:
    with pytest.raises(EndpointNotAllowed, match="https://b is none of the servers"):
        read_allowed({}).client(ServerAddress(url="https://b"), "t", AT)


def test_a_refusal_tells_no_tenant_which_servers_there_are(tmp_path: Path) -> None:
    with pytest.raises(EndpointNotAllowed) as caught:
        read_allowed(settings(tmp_path)).client(ServerAddress(url="http://a"), "t", AT)

    assert "10.0.0.7" not in json.dumps(caught.value.problem())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://svc:topsecret@gw:1", "holds a name or a password"),
        ("https://topsecret@gw", "holds a name or a password"),
        ("http://topsecret:99999", "has a port, or brackets"),
        ("http://topsecret:x", "has a port, or brackets"),
        ("http://[::1", "has a port, or brackets"),
        ("http://topsecret:0", "has port 0"),
        ("http:///topsecret", "is no https://host:port"),
        ("topsecret:80", "is no https://host:port"),
        ("http://topsecret,http://b", "port, or brackets|is no https"),
        ("http://a/?key=topsecret", "is no https://host:port"),
    ],
)
def test_an_address_that_is_listed_wrongly_is_said_by_its_place_and_not_shown(url: str, words: str) -> None:
    with pytest.raises(BadEngineSettings, match=f"AERIE_ENDPOINTS: address 2 ({words})") as caught:
        read_allowed({"AERIE_ENDPOINTS": f"https://good:1 {url}"})

    assert "topsecret" not in json.dumps(caught.value.problem())


def test_a_key_that_could_be_a_word_is_refused(tmp_path: Path) -> None:
    environment = settings(tmp_path)
    (tmp_path / "key").write_text("opensesame12345")

    with pytest.raises(EndpointKeyRefused, match="fewer than 16 characters") as caught:
        read_allowed(environment).client(ServerAddress(url="https://b", key="prod"), "t", AT)

    assert "opensesame" not in json.dumps(caught.value.problem())


@pytest.mark.parametrize(
    "text", ["prod=/key", "[]", '{"prod": "/key"}', '{"prod": {"file": "/key"}}', '{"a": {"file": "/k", "endpoint": "b", "x": 1}}']
)  # fmt: skip
def test_keys_that_are_set_wrongly_are_refused_with_the_settings_name(text: str) -> None:
    with pytest.raises(BadEngineSettings, match="AERIE_ENDPOINT_KEYS"):
        read_allowed({"AERIE_ENDPOINT_KEYS": text})


def test_a_key_is_for_the_tenants_that_the_operator_names(tmp_path: Path) -> None:
    allowed = read_allowed(settings(tmp_path, tenants=["a"]))
    server = ServerAddress(url="https://b", key="prod")

    assert allowed.client(server, "a", AT).url == "https://b"
    with pytest.raises(EndpointKeyRefused, match="no key named prod for jobs of c"):
        allowed.client(server, "c", AT)


def test_a_key_crosses_no_network_in_clear_text_unless_the_operator_says_so(tmp_path: Path) -> None:
    environment = settings(tmp_path, url="http://b:1")
    server = ServerAddress(url="http://b:1", key="prod")

    with pytest.raises(PlainHttpRefused, match="the key prod could be read on the way"):
        read_allowed(environment).client(server, "t", AT)
    assert read_allowed({**environment, "AERIE_ALLOW_PLAIN_HTTP": "1"}).client(server, "t", AT).url == "http://b:1"


@pytest.mark.parametrize("content", [None, b"", b"two\nlines", b"caf\xc3\xa9"])
def test_a_file_without_a_key_is_said_and_its_content_is_not(content: bytes | None, tmp_path: Path) -> None:
    environment = settings(tmp_path)
    (tmp_path / "key").unlink() if content is None else (tmp_path / "key").write_bytes(content)

    with pytest.raises(EndpointKeyRefused, match="the file of the key prod") as caught:
        read_allowed(environment).client(ServerAddress(url="https://b", key="prod"), "t", AT)

    assert "lines" not in caught.value.text()


class Led(socket.socket):
    """A connection that a name led to some address."""

    def __init__(self, peer: str) -> None:
        super().__init__(socket.AF_INET6 if ":" in peer else socket.AF_INET)
        self._peer = peer

    def getpeername(self) -> tuple[str, int]:
        return self._peer, 80


@pytest.mark.parametrize("peer", [
    "169.254.169.254", "::ffff:169.254.169.254", "fe80::1%eth0", "fd00:ec2::254", "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::a9fe:a9fe", "::a9fe:a9fe", "2002:a9fe:a9fe::", "2002:a9fe:a9fe::1", "2001:0:a9fe:a9fe::", "100.100.100.200",
    "192.0.0.192", "168.63.129.16", "::ffff:100.100.100.200", "64:ff9b::c000:c0",
])  # fmt: skip
def test_a_name_that_leads_to_where_clouds_keep_credentials_is_not_spoken_to(peer: str) -> None:
    with Led(peer) as connected, pytest.raises(MetadataServiceRefused, match="where clouds keep credentials"):
        require_no_metadata_service("http://models.example", connected)


@pytest.mark.parametrize(
    ("url", "peer"),
    [
        ("http://m", "10.1.2.3"),
        ("http://m", "::1"),
        ("http://169.254.1.1", "169.254.1.1"),
        ("http://m", "64:ff9b::a01:203"),
        ("http://m", "100.64.0.1"),
        ("http://[fd00:ec2::254]:80", "fd00:ec2::254"),
    ],
)
def test_private_addresses_and_those_that_the_operator_wrote_down_are_his_own_choice(url: str, peer: str) -> None:
    with Led(peer) as connected:
        require_no_metadata_service(url, connected)


# -- in a job


def job(tmp_path: Path, endpoint: Any = None, states: Any = None, **regenerate: Any) -> dict[str, Any]:
    document = tiny_job(tmp_path)
    document["verifier"] |= {"endpoint": endpoint} if endpoint is not None else {}
    document["data"]["regenerate"] |= regenerate
    return document | ({"extraction": {"endpoint": states}} if states is not None else {})


@pytest.mark.parametrize("url", ["ftp://a", "http://user:word@host", "file:///etc", "http://a/?x", "", "http://a b"])
def test_an_endpoint_is_a_plain_address(tmp_path: Path, url: str) -> None:
    for document in (job(tmp_path, {"url": url}), job(tmp_path, states={"url": url})):
        with pytest.raises(InvalidRequest, match="must be an http:// or https:// address") as caught:
            parse_job(document)
        assert (caught.value.pointer or "").endswith("/endpoint/url")


@pytest.mark.parametrize(
    ("endpoint", "regenerate", "pointer", "words"),
    [
        ("http://a", {}, "/verifier/endpoint", "must be an object"),
        ({"url": "http://a", "api_key": "sk-x"}, {}, "/verifier/endpoint/api_key", "no field 'api_key' here"),
        ({"url": "http://a", "key": "Not A Name"}, {}, "/verifier/endpoint/key", "must be 1 to 63 small letters"),
        ({"url": "http://a", "retokenize": True}, {}, "/verifier/endpoint/retokenize", "is for api openai"),
        ({"url": "http://a"}, {"ask": "messages"}, "/data/regenerate/ask", "with api openai, and there is none"),
        ({"url": "http://a"}, {"enabled": False}, "/verifier/endpoint", "enabled is false"),
        ({"url": "http://a"}, {"seed": 1}, "/data/regenerate/seed", "temperature is 0"),
        (None, {"temperature": 1, "seed": 1}, "/data/regenerate/temperature", "needs a verifier.endpoint"),
    ],
)
def test_an_endpoint_that_could_not_be_used_is_refused_when_the_job_is_posted(
    endpoint: Any, regenerate: dict[str, Any], pointer: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        parse_job(job(tmp_path, endpoint, **regenerate))

    assert caught.value.pointer == pointer


def test_a_seed_needs_a_server_that_draws_from_it(tmp_path: Path) -> None:
    document = job(tmp_path, temperature=1, seed=1)
    document["verifier"] |= {"backend": "sglang"}

    with pytest.raises(InvalidRequest, match="seed needs a verifier"):
        parse_job(document)


def test_an_endpoint_samples_whatever_the_backend(tmp_path: Path) -> None:
    spec = parse_job(job(tmp_path, {"url": "http://a"}, {"url": "http://b"}, temperature=0.7, top_p=0.9, seed=3))

    assert [(server.url, at) for server, at in endpoints_of(spec)] == [
        ("http://a", "/verifier/endpoint"), ("http://b", "/extraction/endpoint"),
    ]  # fmt: skip


KEYS: list[tuple[dict[str, Any], StageName, bool]] = [
    ({"endpoint": {"url": "http://b"}}, "generate", False),
    ({"endpoint": {"url": "http://a", "api": "openai"}}, "generate", False),
    ({"endpoint": {"url": "http://a", "key": "k", "timeout_s": 9, "in_flight": 3}}, "generate", True),
    ({"endpoint": {"url": "http://b"}}, "prepare", True),
    ({"endpoint": {"url": "http://b"}}, "extract", True),
    ({"endpoint": {"url": "http://a"}, "states": {"url": "http://b"}}, "extract", False),
    ({"endpoint": {"url": "http://a"}, "states": {"url": "http://b"}}, "prepare", True),
    ({"endpoint": {"url": "http://a", "api": "openai"}, "ask": "messages"}, "prepare", False),
]


@pytest.mark.parametrize(("change", "stage", "same"), KEYS)
def test_who_answers_makes_other_answers_and_how_fast_he_is_asked_does_not(
    change: dict[str, Any], stage: StageName, same: bool, tmp_path: Path
) -> None:
    one, other = (parse_job(job(tmp_path, **c)) for c in ({"endpoint": {"url": "http://a"}}, change))
    keys = [unit_key(stage, s, Slice(0, 0, 1), {}, {"verifier": "v"}, "tenant") for s in (one, other)]

    assert (keys[0] == keys[1]) is same


def test_what_a_running_server_does_waits_for_no_worker_with_sglang(tmp_path: Path) -> None:
    document = job(tmp_path, {"url": "http://a"}, {"url": "http://b"})
    document["verifier"] |= {"backend": "sglang"}
    spec = parse_job(document)

    queues = {name: queue_of(STAGES[name], spec) for name in ("canary", "generate", "extract", "evaluate")}

    assert queues == {
        "canary": "extract-sglang", "generate": "extract", "extract": "extract", "evaluate": "evaluate-sglang",
    }  # fmt: skip
