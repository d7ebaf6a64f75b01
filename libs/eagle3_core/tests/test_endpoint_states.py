"""extract by a server that somebody else runs: how it must capture, where its states must lie, and what else lies there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from running_server import Quirks, RunningServer, running
from safetensors.torch import save

from eagle3_core.digests import digest_bytes
from eagle3_core.engine.capture import ReceiptWrong
from eagle3_core.engine.heard import AnswerWrong
from eagle3_core.engine.proof import OtherVerifier
from eagle3_core.jobs.spec import parse_job
from eagle3_core.objects.local import LocalStore
from eagle3_core.stages.capturing import capturing
from eagle3_core.testing import stage_context, tiny_job
from eagle3_core.verifier.base import Captured
from eagle3_core.verifier.endpoint_states import CaptureDiffers, CaptureNotOffered, SinkUnreachable
from eagle3_core.verifier.identity import inspect
from eagle3_core.verifier.receipt import PROTOCOL, prompt_digest

LAYERS, HIDDEN = [2, 4, 5], 32
SEQUENCES = [[1, 9, 30 + i, 40][: 2 + i % 3] for i in range(7)]


class Capturing:
    """A server whose plug-in captures: states that count tokens, so that each shows which token it is of."""

    def __init__(self, sink: Path) -> None:
        self.sink, self.store = sink, LocalStore(sink)
        self.facts: dict[str, Any] = {
            "protocol": PROTOCOL, "plugin_version": "0.1.0", "engine_version": "0.5.23", "aux_layers": LAYERS,
            "final": "pre", "sink": sink.as_uri(),
        }  # fmt: skip
        self.receipt: dict[str, Any] = {}
        """Changes of the receipts."""
        self.captured = 0

    def __call__(self, handler: Any, body: dict[str, Any], time: int) -> bool:
        ids = body["input_ids"]
        rows = torch.tensor(ids, dtype=torch.float32)[:, None]
        held = {"input_ids": torch.tensor(ids, dtype=torch.int32), "aux": rows.expand(-1, 3 * HIDDEN).contiguous()}
        data = save({**held, "final": rows.expand(-1, HIDDEN).contiguous()})
        self.captured += 1
        key = f"captures/run/{self.captured}.safetensors"
        self.store.put_bytes(key, data)
        receipt = {
            "key": key, "tokens": len(ids), "prompt_digest": prompt_digest(ids), "size": len(data),
            "digest": digest_bytes(data), "dtype": "float32", "aux_layers": LAYERS, "final": "pre",
            "engine_version": "0.5.23", "plugin_version": "0.1.0", **self.receipt,
        }  # fmt: skip
        meta = {"aerie_receipt": receipt, "finish_reason": {"type": "length"}, "prompt_tokens": len(ids)}
        handler.say(200, {"output_ids": [7], "meta_info": meta})
        return True


@pytest.fixture
def capture(tmp_path: Path) -> Capturing:
    return Capturing(tmp_path / "shared" / "states")


@pytest.fixture
def server(tmp_path: Path, capture: Capturing, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    with running(verifier_of(tmp_path), Quirks(before=capture)) as server:
        server.quirks.routes = {"/aerie/capture": capture.facts}
        monkeypatch.setenv("AERIE_ENDPOINTS", server.url)
        yield server


def verifier_of(folder: Path) -> Path:
    if not (folder / "verifier").exists():
        tiny_job(folder)
    return folder / "verifier"


def captured(folder: Path, server: RunningServer, **changes: Any) -> list[Captured]:
    """What a stage gets of `SEQUENCES`."""
    document = tiny_job(folder) | {"extraction": {"aux_layers": LAYERS, "endpoint": {"url": server.url}, **changes}}
    sources = {"verifier": inspect(folder / "verifier").digest}
    states = capturing(stage_context(folder, "extract", parse_job(document), sources=sources))
    return list(states.capture(SEQUENCES, batch_tokens=1, on_progress=lambda *, done, tokens: None))


def test_states_come_in_the_order_in_which_they_were_asked_for_and_nothing_else_in_the_sink_is_touched(
    tmp_path: Path, server: RunningServer, capture: Capturing
) -> None:
    capture.store.put_bytes("captures/other-run/1.safetensors", b"somebody else's")

    found = captured(tmp_path, server)

    assert [one.index for one in found] == list(range(len(SEQUENCES)))
    assert [one.states.final[:, 0].tolist() for one in found] == SEQUENCES
    assert {one.following for one in found} == {7}
    assert [entry.key for entry in capture.store.list("")] == ["captures/other-run/1.safetensors"]


def test_a_server_without_the_plug_in_is_refused_with_the_command_that_starts_one(
    tmp_path: Path, server: RunningServer, capture: Capturing
) -> None:
    server.quirks.routes = {}

    with pytest.raises(CaptureNotOffered, match="without our capture plug-in, or with capture off") as caught:
        captured(tmp_path, server)

    assert "aerie-verifier server.json" in caught.value.remedy
    assert '"aux_layers": [2, 4, 5]' in caught.value.remedy
    assert capture.captured == 0


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"aux_layers": [1, 3, 6]}, r"layers \[1, 3, 6\], the job wants \[2, 4, 5\]"),
        ({"final": "post"}, "final norm post, the job wants pre"),
        ({"engine_version": "0.4.0"}, r"SGLang 0\.4\.0, the job wants 0\.5\.23"),
        ({"protocol": PROTOCOL + 1}, f"protocol {PROTOCOL + 1}, the job wants {PROTOCOL}"),
        ({"sink": 5}, "does not validate"),
    ],
)
def test_a_server_that_captures_otherwise_is_refused_before_the_first_prompt(
    facts: dict[str, Any], words: str, tmp_path: Path, server: RunningServer, capture: Capturing
) -> None:
    capture.facts.update(facts)

    with pytest.raises(CaptureDiffers, match=words):
        captured(tmp_path, server)

    assert capture.captured == 0


def test_a_capturing_server_of_another_model_is_refused_where_the_job_names_it(
    tmp_path: Path, server: RunningServer
) -> None:
    server.quirks.info = {"architectures": ["Qwen3ForCausalLM"]}

    with pytest.raises(OtherVerifier, match="Qwen3ForCausalLM") as caught:
        captured(tmp_path, server)

    assert caught.value.pointer == "/extraction/endpoint"


@pytest.mark.parametrize("sink", ["file:///etc", "s3://bucket/x?endpoint=http://169.254.169.254&plain_http=allowed"])
def test_a_sink_that_the_operator_does_not_allow_is_never_opened(
    sink: str, tmp_path: Path, server: RunningServer, capture: Capturing
) -> None:
    capture.facts["sink"] = sink

    with pytest.raises(SinkUnreachable, match="where this worker may not read") as caught:
        captured(tmp_path, server)

    assert "AERIE_CAPTURE_SINKS" in caught.value.remedy


def test_a_sink_outside_the_roots_may_be_listed_by_the_operator(
    tmp_path: Path, server: RunningServer, capture: Capturing, monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    capture.store, capture.facts["sink"] = LocalStore(elsewhere), elsewhere.as_uri()
    monkeypatch.setenv("AERIE_CAPTURE_SINKS", f"s3://bucket/states {elsewhere.as_uri()}/")

    assert len(captured(tmp_path, server)) == len(SEQUENCES)


def test_a_folder_of_the_same_name_on_another_machine_is_found_out_by_one_capture(
    tmp_path: Path, server: RunningServer, capture: Capturing
) -> None:
    capture.store = LocalStore(tmp_path / "the-servers-own")

    with pytest.raises(SinkUnreachable, match="this worker finds nothing there"):
        captured(tmp_path, server)

    assert capture.captured == 1


@pytest.mark.parametrize(
    ("receipt", "words"),
    [
        ({"digest": "0" * 64}, "the receipt says digest 0000"),
        ({"dtype": "bfloat16"}, "dtype bfloat16, asked for or found was float32"),
        ({"aux_layers": [1, 2, 3]}, "layers"),
        ({"plugin_version": "0.0.9"}, r"plug-in 0\.0\.9, asked for or found was 0\.1\.0"),
        ({"key": "objects/secret"}, r"key objects/secret, asked for or found was captures/"),
    ],
)
def test_states_that_are_not_what_their_receipt_says_do_not_count_and_stay(
    receipt: dict[str, Any], words: str, tmp_path: Path, server: RunningServer, capture: Capturing
) -> None:
    capture.store.put_bytes("objects/secret", b"")
    capture.receipt = receipt

    with pytest.raises(ReceiptWrong, match=words):
        captured(tmp_path, server)

    assert len(list(capture.store.list(""))) == 2


@pytest.mark.parametrize(
    "said", [{"meta_info": 5}, {}, {"meta_info": {"finish_reason": "abort"}}, {"meta_info": {"aerie_receipt": []}}]
)
def test_rubbish_instead_of_a_receipt_is_an_error_that_names_the_server(
    said: dict[str, Any], tmp_path: Path, server: RunningServer, capture: Capturing
) -> None:
    def before(handler: Any, body: dict[str, Any], time: int) -> bool:
        if body["input_ids"] != SEQUENCES[-1]:
            return capture(handler, body, time)
        handler.say(200, said)
        return True

    server.quirks.before = before

    with pytest.raises((AnswerWrong, ReceiptWrong)) as caught:
        captured(tmp_path, server)

    assert server.url in caught.value.detail


def test_an_object_that_is_as_its_receipt_says_and_holds_no_states_does_not_count(
    tmp_path: Path, server: RunningServer, capture: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture.store, "put_bytes", lambda key, data: LocalStore(capture.sink).put_bytes(key, b"no"))
    capture.receipt = {"size": 2, "digest": digest_bytes(b"no")}

    with pytest.raises(ReceiptWrong, match="an object without them"):
        captured(tmp_path, server)


def test_a_server_that_is_started_anew_otherwise_meanwhile_is_found_out(
    tmp_path: Path, server: RunningServer, capture: Capturing
) -> None:
    real = capture.__call__

    def change(handler: Any, body: dict[str, Any], time: int) -> bool:
        if body["input_ids"] == SEQUENCES[-1]:
            capture.facts["plugin_version"] = "0.2.0"
        return real(handler, body, time)

    server.quirks.before = change

    with pytest.raises(CaptureDiffers, match=r"0\.1\.0.* at first and .*0\.2\.0.* at last"):
        captured(tmp_path, server)
