"""Log lines: what they carry, who may read them, and what never stands in them."""

import io
import json
import logging
import threading
import urllib.request
from contextvars import copy_context

import pytest
from prometheus_client import CollectorRegistry, Counter

from eagle3_core.telemetry import logs, traces
from eagle3_core.telemetry.scrape import MetricsAddress, Scrapable, port_of
from eagle3_core.telemetry.secrets import HIDDEN, hide, named_secret


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def root():
    """The root logger, as it was before, afterwards."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def lines(root):
    stream = io.StringIO()
    logs.configure(stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_says_what_it_is_about_and_no_longer_than_that(lines):
    logger = logging.getLogger("aerie.test")
    with logs.about(request_id="req_1", job=None):
        logger.warning("%d units", 3, extra={"ms": 1.5})
    logger.info("over")

    first, second = lines()
    assert (first["event"], first["level"], first["logger"]) == ("3 units", "warning", "aerie.test")
    assert (first["request_id"], first["ms"]) == ("req_1", 1.5)
    assert "job" not in first
    assert "request_id" not in second


def test_what_a_thread_learns_is_said_by_the_block_that_started_it(lines):
    with logs.about(request_id="req_1"):
        thread = threading.Thread(target=copy_context().run, args=(lambda: logs.note(job="job_1"),))
        thread.start()
        thread.join()
        logging.getLogger("a").info("answered")
    logs.note(job="nobody's")
    logging.getLogger("a").info("later")

    assert [line.get("job") for line in lines()] == ["job_1", None]


KEY = "aerie_0123456789abcdef_" + "s" * 43


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abcdefgh12345678", "abcdefgh12345678"),
        (f"the key {KEY} is new", "s" * 43),
        ("postgresql://aerie:pa55word@db:5432/aerie is away", "pa55word"),
        ("redis://:pa55word@redis/0", "pa55word"),
        ("rediss://:pa55@w0rdtail@redis/0", "w0rdtail"),
        ("GET http://s3/b?X-Amz-Signature=c0ffee99&x=1", "c0ffee99"),
        ("GET https://hub/x?access_token=pa55word&x=1", "pa55word"),
        ("connection failed: host=db password=pa55word user=aerie", "pa55word"),
    ],
)
def test_a_secret_is_in_no_line_and_in_no_traceback(lines, text, secret):
    logger = logging.getLogger("a")
    logger.info("%s", text, extra={"said": [text], "worker_token": secret})
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("failed: %s", text)

    whole = json.dumps(lines())
    assert secret not in whole
    assert whole.count(HIDDEN) >= 4
    assert "ValueError" in whole


def test_names_say_what_is_secret_and_counts_of_tokens_are_not():
    secret = ("AERIE_API_KEY", "hf_token", "TOKEN", "aws_secret_access_key", "db_password", "Set-Cookie", "tokens")
    plain = ("max_tokens", "tokens_per_second", "num_tokens", "key", "tokenizer", "keyboard", "stage")
    assert [name for name in secret if not named_secret(name)] == ["tokens"]
    assert [name for name in plain if named_secret(name)] == []


def test_no_text_is_told_that_stands_under_a_secrets_name_however_deep():
    told = hide(
        {"api_keys": ["plain-words"], "password": {"now": "plain-words", "set": True}, "credential": b"plain-words"}
    )

    assert told == {"api_keys": [HIDDEN], "password": {"now": HIDDEN, "set": True}, "credential": HIDDEN}
    assert hide({"eos_token_ids": [1, 2], "secret": "", "token": None}) == {
        "eos_token_ids": [1, 2], "secret": "", "token": None,
    }  # fmt: skip


def test_a_known_secret_is_hidden_wherever_it_stands_and_a_short_word_is_not():
    known = ["swordfish-1", "swordfish-1-longer", "fish"]

    assert hide({"a": ["x swordfish-1-longer y"], "b": 7, "fish": "a fish"}, known) == {
        "a": [f"x {HIDDEN} y"], "b": 7, "fish": "a fish",
    }  # fmt: skip


def test_a_person_at_a_terminal_reads_words(root):
    terminal = Terminal()
    logs.configure(terminal)
    with logs.about(job="job_1"):
        logging.getLogger("a").info("committed")

    assert "committed" in terminal.getvalue()
    assert "job_1" in terminal.getvalue()
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(terminal.getvalue())


def test_a_line_of_somebody_elses_making_stays_one_line(lines):
    logging.getLogger("a").info("two\nlines %s", '{"level": "critical"}')

    assert [line["level"] for line in lines()] == ["info"]


def test_nothing_is_traced_where_no_collector_is_named():
    assert not traces.configure("aerie-test", {})
    with traces.span("work", job="job_1") as span:
        span.rename("other")
        span.fail("it broke")
        assert traces.current() is None


def test_metrics_are_served_until_they_are_closed_and_a_taken_port_is_refused():
    registry = CollectorRegistry()
    Counter("aerie_test", "Things.", registry=registry).inc()
    scrapable = Scrapable(registry, "127.0.0.1", 0)
    port = int(scrapable.url.split(":")[2].split("/")[0])

    assert "aerie_test_total 1.0" in urllib.request.urlopen(scrapable.url).read().decode()
    with pytest.raises(MetricsAddress, match=str(port)):
        Scrapable(registry, "127.0.0.1", port)
    scrapable.close()
    Scrapable(registry, "127.0.0.1", port).close()


@pytest.mark.parametrize("given", ["http", "-1", "70000", "9.5"])
def test_what_is_no_port_is_named(given):
    assert port_of({}, "P") is None
    assert port_of({"P": "off"}, "P") is None
    with pytest.raises(MetricsAddress, match=given):
        port_of({"P": given}, "P")
