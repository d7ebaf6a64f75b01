"""What of real chats is kept, and above all what is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aerie_verifier.traffic import (
    Draw,
    Keeper,
    Traffic,
    TrafficMisconfigured,
    plain_messages,
    read_traffic,
    redaction,
)
from eagle3_core.data.rows import parse, row_of
from eagle3_core.engine.config import TRAFFIC_VARIABLE, ServerConfig, TrafficConfig
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.protocol import StoreFull


def config(**fields: Any) -> TrafficConfig:
    return TrafficConfig.model_validate({"sink": "file:///nowhere", "share": 1.0, **fields})


def keeper(folder: Path, redact: Any = lambda sample: sample, **fields: Any) -> Keeper:
    return Keeper(config(**fields), LocalStore(folder), redact, now=lambda: datetime(2026, 11, 30, tzinfo=UTC))


def chat(*turns: tuple[str, Any], **more: Any) -> SimpleNamespace:
    return SimpleNamespace(messages=[SimpleNamespace(role=role, content=content, **more) for role, content in turns])


def sample(text: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
    return {"id": "one", "task": "traffic", "messages": turns}


def kept(folder: Path) -> list[str]:
    return [line for path in sorted(folder.rglob("*.jsonl")) for line in path.read_text().splitlines()]


def answered(traffic: Traffic, request: Any, reason: str = "stop", tools: Any = None, choices: int = 1) -> Any:
    """The response that a client gets for `request`, through the hook."""
    message = SimpleNamespace(content="hello", tool_calls=tools)
    response = SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason=reason)] * choices)

    async def original(*_: Any) -> Any:
        return response

    assert asyncio.run(traffic.whole(original, None, None, request, None)) is response
    return response


def streamed(traffic: Traffic, request: Any, events: list[dict[str, Any] | str]) -> list[str]:
    """What a client hears of an answer in pieces, through the hook."""
    said = [event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n" for event in events]

    async def original(*_: Any) -> AsyncIterator[str]:
        for event in said:
            yield event

    async def heard() -> list[str]:
        return [event async for event in traffic.streamed(original, None, None, request, None)]

    assert asyncio.run(heard()) == said
    return said


def piece(text: str | None, reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": reason}]}


def test_nothing_is_kept_unless_the_operator_says_so(tmp_path: Path) -> None:
    assert read_traffic({}) is None
    assert ServerConfig(model=tmp_path).traffic is None


def test_a_chat_that_was_kept_is_a_line_that_data_sets_read(tmp_path: Path) -> None:
    here = keeper(tmp_path)
    traffic = Traffic(Draw(here.config), here)

    answered(traffic, chat(("system", "be kind"), ("user", "good day")))
    here.close()

    (line,) = kept(tmp_path)
    read = parse(row_of(line.encode()), "messages", name="line 1", task="", answers_needed=True)
    assert read.task == "traffic"
    assert [(m["role"], m["content"]) for m in read.messages] == [
        ("system", "be kind"), ("user", "good day"), ("assistant", "hello"),
    ]  # fmt: skip
    assert next(tmp_path.rglob("*.jsonl")).parent.name == "2026-11-30"


def test_an_answer_in_pieces_is_kept_whole_and_sent_as_it_was(tmp_path: Path) -> None:
    here = keeper(tmp_path)

    streamed(
        Traffic(Draw(here.config), here), chat(("user", [SimpleNamespace(type="text", text="hi")])),
        [piece(None), piece("hel"), piece("lo"), piece(None, "stop"), {"choices": [], "usage": {}}, "data: [DONE]\n\n"],
    )  # fmt: skip
    here.close()

    assert json.loads(kept(tmp_path)[0])["messages"][-1] == {"role": "assistant", "content": "hello"}


def test_what_is_more_than_plain_text_or_did_not_end_is_passed_over(tmp_path: Path) -> None:
    here = keeper(tmp_path)
    traffic = Traffic(Draw(here.config), here)
    plain, image = chat(("user", "hi")), chat(("user", [SimpleNamespace(type="image_url")]))

    answered(traffic, image)
    answered(traffic, chat(("tool", "42")))
    answered(traffic, chat(("user", "hi"), tool_calls=["call"]))
    answered(traffic, plain, reason="abort")
    answered(traffic, plain, tools=["call"])
    answered(traffic, plain, choices=2)
    streamed(traffic, plain, [piece("hel")])
    streamed(traffic, plain, [piece("hel", tool_calls=[{}]), piece(None, "stop")])
    here.close()

    assert kept(tmp_path) == []
    assert plain_messages(image.messages) is None


def test_a_share_is_drawn_and_a_minute_has_its_ceiling() -> None:
    seconds, chances = 0.0, iter([0.2, 0.3, 0.1, 0.1, 0.1, 0.1])
    draw = Draw(config(share=0.25, per_minute=2), lambda: next(chances), lambda: seconds)

    first = [draw.chosen() for _ in range(5)]
    seconds = 61.0

    assert first == [True, False, True, False, False]
    assert draw.chosen()


def test_redaction_runs_before_anything_is_written_and_may_drop_a_sample(tmp_path: Path) -> None:
    def redact(given: dict[str, Any]) -> dict[str, Any] | None:
        text = given["messages"][0]["content"]
        if "secret" in text:
            return None
        return given | {"messages": [{"role": "user", "content": text.replace("Ann", "[name]")}]}

    here = keeper(tmp_path, redact)
    here.write([sample("a secret"), sample("I am Ann")])

    (line,) = kept(tmp_path)
    assert json.loads(line)["messages"] == [{"role": "user", "content": "I am [name]"}]
    assert (here.counts["kept"], here.counts["redacted"]) == (1, 1)


def test_a_sample_whose_redaction_fails_is_not_kept_nor_quoted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def redact(given: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(f"cannot parse {given['messages'][0]['content']}")

    here = keeper(tmp_path, redact)
    here.write([sample("my password is swordfish")])

    assert kept(tmp_path) == []
    assert here.counts["failed"] == 1
    assert "redaction failed with ValueError" in caplog.text
    assert "swordfish" not in caplog.text


def test_samples_are_deleted_after_their_time_and_nothing_else_is(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for key in ("traffic/2026-10-30/a.jsonl", "traffic/2026-10-31/b.jsonl", "traffic/2026-11-29/c.jsonl", "captures/x"):
        store.put_bytes(key, b"{}")

    keeper(tmp_path, retention_days=30).sweep()

    assert [s.key for s in store.list("")] == ["captures/x", "traffic/2026-10-31/b.jsonl", "traffic/2026-11-29/c.jsonl"]


def test_a_sink_that_fails_or_lags_costs_samples_and_never_an_answer(tmp_path: Path) -> None:
    class Full(LocalStore):
        def put_bytes(self, key: str, data: bytes) -> None:
            raise StoreFull("no room", remedy="make some")

    here = Keeper(config(), Full(tmp_path), lambda given: given)
    traffic = Traffic(Draw(config(per_minute=1000)), here)
    for _ in range(3):
        answered(traffic, chat(("user", "hi")))
    here.close()

    assert (here.counts["kept"], here.counts["failed"]) == (0, 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"sink": "file:///x"}', "share: the field 'share' is missing"),
        ('{"sink": "file:///x", "share": 1, "rate": 2}', "rate: no field .rate. here"),
    ],
)
def test_a_setting_that_is_wrong_stops_the_server_with_its_name(text: str, reason: str) -> None:
    with pytest.raises(TrafficMisconfigured, match=reason):
        read_traffic({TRAFFIC_VARIABLE: text})


@pytest.mark.parametrize(
    ("name", "reason"),
    [("no_such_module:f", "cannot be imported"), ("json:nothing", "cannot be"), ("sys:path", "no function")],
)
def test_a_redaction_that_is_not_there_stops_the_server_with_its_name(name: str, reason: str) -> None:
    with pytest.raises(TrafficMisconfigured, match=f"{name} .*{reason}|{name} is {reason}"):
        redaction(name)
