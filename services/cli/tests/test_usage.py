"""Commands that were called wrongly, and addresses that are none or lead to somebody else: words, JSON, an exit status."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aerie_cli.client import BadUrl, checked_url
from eagle3_core import strict_json


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--no-such-option"),
        ("status", "--limit", "many"),
        ("status", "--limit", "0"),
        ("status", "a", "b"),
        ("submit",),
        ("inspect", "job"),
        ("inspect", "nothing"),
        ("up", "--port", "70000"),
        ("up", "--workers", "-1"),
        ("demo", "--threads", "0"),
        ("stage", "train"),
        ("nothing",),
        ("logs", "job_1", "--tail", "x"),
    ],
)
def test_wrong_usage_is_a_problem_document_where_json_is_asked_for_and_words_where_not(offline, arguments):
    asked, told = offline(*arguments, "--json"), offline(*arguments)

    problem = strict_json.loads(asked.stdout)
    assert (asked.exit_code, told.exit_code) == (2, 2)
    assert problem["code"] == "cli.usage"
    assert "--help` lists what it takes" in problem["remedy"]
    assert asked.stderr == told.stdout == ""
    assert "error cli.usage: aerie" in told.stderr


def test_without_a_command_the_commands_are_listed(offline):
    assert offline().exit_code == 2
    assert "submit" in offline().stdout
    assert "shard" in offline("inspect").stdout


GARBAGE = [
    "http://127.0.0.1:x", "http://127.0.0.1:99999", "http://127.0.0.1:0", "127.0.0.1:8000", "ftp://host", "http://", "http:///jobs",
    "file:///etc/passwd", "http://host/?a=b", "http://host#x", "http://[::1", "http://a b", "\x00", "http://\x1b[2J", "://", "//host",
    "http://" + "a" * 70000, "http://xn--\udcff", "http://\u2603.\ud800", "javascript:alert(1)", "http://host:8000:9",
]  # fmt: skip


@pytest.mark.parametrize("url", GARBAGE, ids=range(len(GARBAGE)))
def test_an_address_that_is_none_is_refused_wherever_it_comes_from(offline, monkeypatch, tmp_path, url):
    by_option = offline("status", "--url", url, "--json")

    assert (by_option.exit_code, strict_json.loads(by_option.stdout)["code"]) == (2, "api.url")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/server.json").write_text(json.dumps({"url": url, "pid": 1}))
    by_folder = offline("status", "--dir", str(tmp_path))
    assert by_folder.exit_code in (2, 4)  # 4: a file that is not even JSON names no house
    if "\x00" not in url and "\ud800" not in url and "\udcff" not in url:
        by_environment = type(offline)(url)("status")
        assert by_environment.exit_code == 2
        assert "AERIE_URL is" in by_environment.stderr


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=30) | st.text("htp:/@[]?#%.0129az", max_size=30).map("http://".__add__))
def test_any_text_is_an_address_or_refused(text):
    try:
        assert checked_url(text, "--url").startswith(("http", "HTTP"))
    except BadUrl:
        return


@pytest.mark.parametrize("content", ["", "[]", "{", '{"pid": 1}', '{"url": NaN}', "\x00" * 9])
def test_a_house_file_that_says_nothing_is_no_house(offline, tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/server.json").write_text(content)

    asked = offline("status", "--dir", str(tmp_path), "--json")

    assert (asked.exit_code, strict_json.loads(asked.stdout)["code"]) == (4, "api.unreachable")


@pytest.fixture
def stranger(offline):
    """The command, pointed at a server that answers everything with one answer."""
    server = None
    answer: tuple[int, str, bytes] = (200, "text/html", b"")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(answer[0])
            self.send_header("Content-Type", answer[1])
            self.send_header("Content-Length", str(len(answer[2])))
            if 300 <= answer[0] < 400:
                self.send_header("Location", "/elsewhere")
            if answer[1] == "gzip":
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(answer[2])

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def ask(status, kind, body, *arguments, stdin=None):
        nonlocal answer
        answer = (status, kind, body)
        return type(offline)(f"http://127.0.0.1:{server.server_port}")(*arguments, stdin=stdin)

    yield ask
    server.shutdown()
    thread.join()
    server.server_close()


COMMANDS = [
    ("status",), ("status", "job_1"), ("watch", "job_1"), ("logs", "job_1"), ("logs", "job_1", "--follow"), ("cancel", "job_1"),
    ("retry", "job_1"), ("inspect", "job", "job_1"), ("download", "job_1"), ("submit", "-"), ("plan", "-"),
]  # fmt: skip
STRANGE = [
    (200, "text/html", b"<html>"), (200, "application/json", b"[]"), (200, "application/json", b'{"object": "other"}'),
    (200, "application/json", b'{"data": NaN}'), (200, "application/json", b"[" * 100_000), (200, "text/plain", b"\xff\xfe"),
    (200, "text/plain", b""), (302, "text/html", b""), (404, "text/html", b"<html>"), (404, "application/json", b'"no"'),
    (500, "application/json", b'{"errors": 3, "status": "x"}'), (403, "application/json", b'{"detail": "no"}'),
    (304, "text/html", b""), (200, "gzip", b"no gzip"),
]  # fmt: skip


@pytest.mark.parametrize("strange", STRANGE, ids=range(len(STRANGE)))
def test_what_is_not_aeries_answer_is_called_that_by_every_command(stranger, strange):
    for arguments in COMMANDS:
        asked = stranger(*strange, *arguments, "--json", stdin="{}" if arguments[-1] == "-" else None)

        problem = strict_json.loads(asked.stdout.splitlines()[-1])
        assert (asked.exit_code, problem["code"]) == (4, "api.foreign"), arguments
        assert "not Aerie's API" in problem["detail"]


def test_a_proxy_whose_api_is_away_is_an_api_that_does_not_answer(stranger):
    asked = stranger(503, "text/html", b"<html>", "status", "--json")

    assert (asked.exit_code, strict_json.loads(asked.stdout)["code"]) == (4, "api.unreachable")


def test_a_problem_of_a_kind_that_is_not_known_here_is_told_as_it_came(stranger):
    problem = {
        "type": "urn:aerie:problem:tenant.quota", "title": "The tenant has used up its quota.", "status": 429,
        "detail": "10 of 10 jobs", "code": "tenant.quota", "remedy": "wait",
        "errors": [{"pointer": "/a", "detail": "x"}, {"pointer": "/b", "detail": "y"}],
    }  # fmt: skip

    asked = stranger(429, "application/problem+json", json.dumps(problem).encode(), "status", "--json")

    assert (asked.exit_code, strict_json.loads(asked.stdout)) == (2, problem)


@pytest.mark.parametrize(
    "job", ["", "a/b", "..", ".", "job_1/events", "job 1", "é", "-1", "job_1?x=1", "\x1b[2J", "x" * 200]
)
def test_what_is_no_id_of_a_job_is_refused_before_anything_is_asked(offline, job):
    there = type(offline)("http://127.0.0.1:9")

    for command in (("status",), ("watch",), ("logs",), ("cancel",), ("retry",), ("download",), ("inspect", "job")):
        asked = there(*command, "--json", "--", job)

        problem = strict_json.loads(asked.stdout)
        assert (asked.exit_code, problem["code"]) == (2, "request.invalid"), command
