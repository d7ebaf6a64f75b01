"""What is counted of an engine's answers, and what an engine must be before it is believed."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.engine.client import Client
from eagle3_core.engine.config import SPARE_TOKENS
from eagle3_core.evaluate.served import (
    AnswerUnusable,
    Exported,
    NotDrafting,
    OtherDrafter,
    ServedAnswer,
    ServersDiffer,
    ask,
    deliver,
    folder_digest,
    read_answer,
    replay_on,
    require_comparable,
)
from eagle3_core.evaluate.speed import ROUNDS, measure_speed
from eagle3_core.jobs.spec import JobSpec, parse_job
from eagle3_core.stages.served import longest
from eagle3_core.verifier.base import Decoding

HOW = Decoding(max_new_tokens=6, batch_size=2, eos_ids=(2,))
PLAIN = {
    "version": "0.5.23", "model_path": "/v", "dtype": "float32", "device": "cpu", "tp_size": 1, "speculative_algorithm": None,
}  # fmt: skip


class Engine(ThreadingHTTPServer):
    """Counts upwards from a prompt's last token, three a verify call; its facts and answers can be changed."""

    daemon_threads = True

    def __init__(self, info: dict[str, Any], *, drafts: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.info, self.drafts = info, drafts
        self.asked: list[dict[str, Any]] = []
        self.changes: dict[int, int] = {}
        """Tokens that it says instead of others."""
        self.log_probability: dict[int, float] = {}

    @property
    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.server_address[1]}")

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        last, count = body["input_ids"][-1], body["sampling_params"]["max_new_tokens"]
        ids = [self.changes.get(token, token) for token in range(last + 1, last + 1 + count)]
        meta: dict[str, Any] = {"completion_tokens": count, "prompt_tokens": len(body["input_ids"])}
        if self.drafts and count > 1:
            calls = math.ceil((count - 1) / 3)
            meta |= {"spec_verify_ct": calls, "spec_correct_drafts_histogram": [0, 0, calls]}
        if tokens := body.get("token_ids_logprob"):
            best = max(self.log_probability.values())
            meta |= {
                "output_top_logprobs": [[[best, 0, None]]],
                "output_token_ids_logprobs": [[[self.log_probability[t], t, None] for t in tokens]],
            }
        return {"output_ids": ids, "meta_info": meta}


class _Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        self._say(self.server.info)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self._say(self.server.answer(body))

    def _say(self, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    folder = tmp_path / "sglang"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return Exported(folder, 3, folder_digest(folder))


@pytest.fixture
def engines(exported: Exported) -> Iterator[tuple[Engine, Engine]]:
    """Without and with the drafter."""
    drafting = PLAIN | {
        "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(exported.folder),
        "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
    }  # fmt: skip
    both = Engine(PLAIN, drafts=False), Engine(drafting, drafts=True)
    for engine in both:
        threading.Thread(target=engine.serve_forever, args=(0.01,), daemon=True).start()
    yield both
    for engine in both:
        engine.shutdown()
        engine.server_close()


def go_on(*, done: int, tokens: int) -> None:
    """Never stop."""


def test_answers_come_in_the_order_of_the_prompts_with_their_verify_calls(engines: tuple[Engine, Engine]) -> None:
    prompts = [[10 * i] for i in range(7)]

    answers = ask(engines[1].client, prompts, HOW, drafting=True, on_progress=go_on)

    assert [a.ids for a in answers] == [[p + k for k in range(1, 7)] for (p,) in prompts]
    assert {(a.calls, a.by_right) for a in answers} == {(2, (0, 0, 2))}
    assert engines[1].asked[0]["sampling_params"] == {"temperature": 0, "max_new_tokens": 6, "stop_token_ids": [2]}


def test_a_first_token_that_ends_the_answer_cost_no_verify_call() -> None:
    one = {"output_ids": [2], "meta_info": {"completion_tokens": 1}}

    assert read_answer(one, drafting=True) == ServedAnswer([2], 0, ())


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"completion_tokens": 3}, "3 tokens and spec_verify_ct None: the server did not draft"),
        ({"completion_tokens": 3, "spec_verify_ct": 0}, "spec_verify_ct 0"),
        ({"completion_tokens": 2, "spec_verify_ct": 1}, "3 output_ids and completion_tokens 2"),
        ({"completion_tokens": 3, "spec_verify_ct": 2}, "a spec_correct_drafts_histogram of 0 calls"),
        (
            {"completion_tokens": 3, "spec_verify_ct": 2, "spec_correct_drafts_histogram": [1, 2]},
            "spec_verify_ct 2 and a spec_correct_drafts_histogram of 3 calls",
        ),
    ],
)
def test_an_answer_without_sound_counts_is_an_error_that_names_them(meta: dict[str, Any], reason: str) -> None:
    with pytest.raises(AnswerUnusable, match=reason):
        read_answer({"output_ids": [5, 6, 7], "meta_info": meta}, drafting=True)


def test_an_answer_without_token_ids_is_an_error() -> None:
    with pytest.raises(AnswerUnusable, match="no output_ids"):
        read_answer({"text": "hello", "meta_info": {"completion_tokens": 2}}, drafting=False)


def test_two_servers_that_differ_in_the_drafter_alone_are_compared(
    engines: tuple[Engine, Engine], exported: Exported
) -> None:
    plain, drafting = engines

    facts = require_comparable(plain.client, drafting.client, exported)

    assert facts == {"version": "0.5.23", "dtype": "float32", "device": "cpu"}


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"speculative_algorithm": None}, NotDrafting, "speculative_algorithm: it runs with None, wanted is EAGLE3"),
        ({"speculative_algorithm": "EAGLE"}, NotDrafting, "it runs with EAGLE, wanted is EAGLE3"),
        ({"speculative_num_steps": 5}, NotDrafting, "speculative_num_steps: it runs with 5, wanted is 3"),
        ({"speculative_eagle_topk": 4}, NotDrafting, "speculative_eagle_topk: it runs with 4, wanted is 1"),
        ({"speculative_draft_model_path": "/other"}, OtherDrafter, "drafts with /other, to be measured is"),
        ({"speculative_draft_model_path": None}, OtherDrafter, "drafts with None"),
        ({"dtype": "bfloat16"}, ServersDiffer, "dtype: float32 without, bfloat16 with the drafter"),
        ({"version": "0.5.24"}, ServersDiffer, r"version: 0.5.23 without, 0.5.24 with"),
    ],
)
def test_a_server_that_runs_something_else_is_refused_with_both_sides(
    engines: tuple[Engine, Engine], exported: Exported, changes: dict[str, Any], error: type[Exception], reason: str
) -> None:
    plain, drafting = engines
    drafting.info |= changes

    with pytest.raises(error, match=reason):
        require_comparable(plain.client, drafting.client, exported)


def test_a_plain_server_that_drafts_is_refused(engines: tuple[Engine, Engine], exported: Exported) -> None:
    _, drafting = engines

    with pytest.raises(ServersDiffer, match="must not draft runs with speculative_algorithm EAGLE3"):
        require_comparable(drafting.client, drafting.client, exported)


def test_a_drafter_whose_files_were_replaced_is_refused(engines: tuple[Engine, Engine], exported: Exported) -> None:
    plain, drafting = engines
    (exported.folder / "model.safetensors").write_bytes(b"other weights")

    with pytest.raises(OtherDrafter, match="holds files of digest"):
        require_comparable(plain.client, drafting.client, exported)


def delivered(engines: tuple[Engine, Engine], *, exact: bool) -> list[tuple[bool, bool, float | None]]:
    plain, drafting = engines
    done = deliver(
        plain.client, drafting.client, [[10], [20]], HOW, near_tie_logit_gap=0.25, exact=exact, on_progress=go_on
    )
    return [(d.verdict.equal, d.verdict.near_tie, d.verdict.gap) for d in done]


def test_equal_answers_are_lossless(engines: tuple[Engine, Engine]) -> None:
    assert delivered(engines, exact=True) == [(True, False, None)] * 2


def test_a_token_that_differs_is_judged_by_the_logits_of_the_plain_server(engines: tuple[Engine, Engine]) -> None:
    plain, drafting = engines
    drafting.changes = {23: 99}
    plain.log_probability = {23: -0.5, 99: -0.7}

    assert delivered(engines, exact=False) == [(True, False, None), (False, True, pytest.approx(0.2))]
    assert delivered(engines, exact=True)[1] == (False, False, pytest.approx(0.2))
    replayed = plain.asked[-1]
    assert (replayed["input_ids"], replayed["token_ids_logprob"]) == ([20, 21, 22], [99, 23])

    plain.log_probability = {23: -0.5, 99: -3.0}
    assert delivered(engines, exact=False)[1] == (False, False, pytest.approx(2.5))


def test_the_gap_is_measured_from_the_best_logit_of_all(engines: tuple[Engine, Engine]) -> None:
    plain, _ = engines
    plain.log_probability = {7: -0.1, 5: -1.0, 6: -2.0}

    assert replay_on(plain.client)([1], (5, 6)) == pytest.approx(1.9)


def test_what_progress_raises_ends_the_asking(engines: tuple[Engine, Engine]) -> None:
    def stop(*, done: int, tokens: int) -> None:
        if done >= 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        ask(engines[0].client, [[i] for i in range(50)], HOW, drafting=False, on_progress=stop)

    assert len(engines[0].asked) < 50


def test_speed_is_taken_by_turns_and_every_round_starts_with_the_other_server(engines: tuple[Engine, Engine]) -> None:
    plain, drafting = engines
    seconds = {id(plain): 2.0, id(drafting): 1.0}
    now, turns = 0.0, list[int]()

    def clock() -> float:
        nonlocal now
        for engine in engines:
            if engine.asked:  # the run that has just ended was this one's
                turns.append(engines.index(engine))
                now += seconds[id(engine)]
                engine.asked.clear()
        return now

    speeds = measure_speed(plain.client, drafting.client, [[10], [20]], HOW, (1, 4), on_progress=go_on, clock=clock)

    assert ROUNDS == 2
    assert turns == [0, 1, 0, 1, 1, 0, 1, 0]
    assert [(s["in_flight"], s["factor"]) for s in speeds] == [(1, 2.0), (4, 2.0)]
    assert speeds[0] == {"in_flight": 1, "plain_tokens_per_s": 6.0, "drafted_tokens_per_s": 12.0, "factor": 2.0}
    assert speeds[1]["plain_tokens_per_s"] == 12.0


def test_answers_end_before_the_engine_would_cut_them_so_that_both_sides_cut_alike() -> None:
    def spec(**engine: int) -> JobSpec:
        verifier = {"model": "/m", "backend": "sglang", "engine": engine}
        prompts = [{"uri": "/p"}]
        return parse_job(
            {"name": "n", "verifier": verifier, "datasets": prompts, "evaluation": {"prompts": prompts, "num_steps": 3}}
        )

    assert longest(spec(), 2048) == 2048 - SPARE_TOKENS - 4
    assert longest(spec(kv_cache_tokens=512), 2048) == 512 - SPARE_TOKENS - 4
    plain = parse_job(spec().model_dump(mode="json") | {"verifier": {"model": "/m"}})
    assert longest(plain, 2048) == 2048
