"""A serving verifier that was told to keep chats keeps them, redacted, and answers as ever."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from conftest import FORKED, HERE, cpu_server
from house import wait_for

from aerie_verifier import traffic
from eagle3_core.data.rows import parse, row_of
from eagle3_core.engine.config import TrafficConfig

REDACTION = """
def redact(sample):
    first = sample["messages"][0]
    first["content"] = first["content"].replace("Ann", "[name]")
    return None if "secret" in first["content"] else sample
"""


def kept(sink: Path, count: int) -> list[str]:
    """The lines of the sink, once there are `count`."""

    def come() -> list[str] | None:
        lines = [line for path in sorted(sink.rglob("*.jsonl")) for line in path.read_text().splitlines()]
        return lines if len(lines) >= count else None

    return wait_for(f"{count} samples", come, 10 * traffic.FLUSH_S)


def test_chats_are_kept_redacted_whether_sent_whole_or_in_pieces_and_plain_requests_are_not(
    verifier: Path, tmp_path: Path
) -> None:
    (tmp_path / "house_redaction.py").write_text(REDACTION)
    config = TrafficConfig(sink=(tmp_path / "sink").as_uri(), share=1.0, redact="house_redaction:redact")
    path = {**FORKED, "PYTHONPATH": f"{HERE / 'cpu_engine'}:{tmp_path}"}
    ask = {"model": "default", "max_tokens": 6, "temperature": 0}

    with cpu_server(verifier, tmp_path / "log", path, traffic=config) as server:
        answers = [
            server.post("/v1/chat/completions", {**ask, "messages": [{"role": "user", "content": text}]})
            for text in ("I am Ann", "a secret")
        ]
        server.post("/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}})
        body = {**ask, "messages": [{"role": "user", "content": "Ann again"}], "stream": True}
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            events = answer.read().decode()
        lines = kept(tmp_path / "sink", 2)

    read = [parse(row_of(line.encode()), "messages", name="", task="", answers_needed=True) for line in lines]
    told = {conversation.messages[0]["content"]: conversation.messages[1]["content"] for conversation in read}
    pieces = [json.loads(e.removeprefix("data: ")) for e in events.splitlines() if e.startswith("data: {")]
    streamed = "".join(c["delta"].get("content") or "" for piece in pieces for c in piece["choices"])
    assert told == {"I am [name]": answers[0]["choices"][0]["message"]["content"], "[name] again": streamed}
