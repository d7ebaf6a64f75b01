"""The guards of the hooks, against the engine's own functions and types, without a server."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import plugins
from sglang.srt.model_executor import cuda_graph_config as graphs
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from aerie_verifier import attach, engine
from aerie_verifier.config import CaptureMisconfigured
from aerie_verifier.engine import Capture, LayersDiffer
from aerie_verifier.frontdoor import FrontDoor
from aerie_verifier.mailbox import Mailbox
from aerie_verifier.writer import Captured
from eagle3_core.engine.config import CAPTURE_VARIABLE, TRAFFIC_VARIABLE, CaptureConfig, TrafficConfig

CONFIG = CaptureConfig(sink="file:///nowhere", aux_layers=(2, 4, 5))
LOST = TrafficConfig(sink="file:///nowhere", share=1.0, redact="no_such_package:redact")
HIDDEN = 4


class Model(torch.nn.Module):
    """A model that says which layers it captures."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.layers_to_capture = layers


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.samples: list[Captured] = []

    def submit(self, captured: Captured) -> None:
        self.samples.append(captured)


def capture(**fields: Any) -> Capture:
    return Capture(CONFIG, "/nowhere", (), **{"tell": print, "confirmed": True, "run": "r", "writer": Kept(), **fields})


def request(rid: str, tokens: int, asks: object = True, chunks_to_come: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        rid=rid, origin_input_ids=list(range(tokens)), return_hidden_states=asks, is_retracted=False,
        inflight_middle_chunks=chunks_to_come, to_finish=None, finished=lambda: False,
    )  # fmt: skip


def batch(*reqs: SimpleNamespace, starts: list[int]) -> SimpleNamespace:
    return SimpleNamespace(reqs=reqs, prefix_lens=starts, return_hidden_states_mode=CaptureHiddenMode.FULL)


def result(rows: int, counts: list[int]) -> SimpleNamespace:
    aux = torch.arange(rows, dtype=torch.float32)[:, None].expand(-1, 3 * HIDDEN)
    out = SimpleNamespace(hidden_states=aux, last_hidden_states=aux[:, :HIDDEN])
    return SimpleNamespace(logits_output=out, copy_done=None, extend_input_len_per_req=counts)


def test_every_hook_finds_its_function_in_this_engine() -> None:
    hooks = attach.hooks_of(CONFIG, capture(), FrontDoor(CONFIG, Mailbox("/nowhere")))

    for hook in hooks:
        attach._prove(hook)

    assert len(hooks) == 6 + len(attach.CHANGES)


def test_a_function_that_moved_or_changed_stops_the_server_with_its_name() -> None:
    moved = attach.Hook(attach.GATHER + "_elsewhere", "BEFORE", print, ("self",))
    changed = attach.Hook(attach.GATHER, "BEFORE", print, ("self", "result"))

    with pytest.raises(CaptureMisconfigured, match="process_batch_result_prefill_elsewhere"):
        attach._prove(moved)
    with pytest.raises(CaptureMisconfigured, match="takes self, batch, result; known is self, result"):
        attach._prove(changed)


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        (CAPTURE_VARIABLE, "{}", r"capture\.config"),
        (TRAFFIC_VARIABLE, LOST.model_dump_json(), r"traffic\.redact no_such_package:redact cannot be imported"),
    ],
)
def test_the_engines_own_loader_does_not_swallow_what_stops_the_server(
    variable: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(plugins, "_plugins_loaded", False)

    with pytest.raises(SystemExit, match=reason):
        plugins.load_plugins()


def test_an_older_engine_is_refused_with_its_version_and_the_one_that_was_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CAPTURE_VARIABLE, CONFIG.model_dump_json())
    monkeypatch.setattr(attach, "engine_version", lambda: "0.5.22")

    with pytest.raises(CaptureMisconfigured, match=r"this is SGLang 0\.5\.22, the plug-in was tested with 0\.5\.23"):
        attach.attach()


def test_hooks_that_the_engine_did_not_take_stop_it() -> None:
    unhooked = Capture(CONFIG, "/nowhere", ("sglang.srt.nothing",))

    with pytest.raises(CaptureMisconfigured, match=r"did not take the hooks on sglang\.srt\.nothing"):
        unhooked.confirm_layers(None, model=Model([2, 4, 5]), eagle_use_aux_hidden_state=True)


def test_an_engine_that_captures_other_layers_is_stopped_with_both_lists() -> None:
    with pytest.raises(LayersDiffer, match=r"layers \[3, 5, 6\], the configuration wants \[2, 4, 5\]"):
        capture().confirm_layers(None, model=Model([3, 5, 6]), eagle_use_aux_hidden_state=True)


def test_an_engine_that_does_not_capture_at_all_is_stopped() -> None:
    with pytest.raises(CaptureMisconfigured, match="captures no auxiliary states"):
        capture().confirm_layers(None, model=Model([]), eagle_use_aux_hidden_state=False)


def recorded(backend: str) -> SimpleNamespace:
    """What an engine says whose prefill is recorded by `backend`."""
    config = graphs.with_phase(graphs.CudaGraphConfig(), graphs.Phase.PREFILL, backend=backend)
    return SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=config))


@pytest.mark.parametrize("backend", [graphs.Backend.BREAKABLE, graphs.Backend.FULL])
def test_an_engine_that_replays_prefill_from_cuda_graphs_is_stopped(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "get_exec", lambda: recorded(backend))

    with pytest.raises(CaptureMisconfigured, match="CUDA graphs, which call no hooks"):
        capture().confirm_layers(None, model=Model([2, 4, 5]), eagle_use_aux_hidden_state=True)


def test_an_engine_that_does_not_and_captures_what_it_should_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "get_exec", lambda: recorded(graphs.Backend.DISABLED))
    monkeypatch.setattr(engine, "_writes", lambda: False)
    here = capture(confirmed=False)

    here.confirm_layers(None, model=Model([2, 4, 5]), eagle_use_aux_hidden_state=True)

    assert here.confirmed


def test_a_model_whose_final_norm_hands_out_nothing_is_an_error() -> None:
    with pytest.raises(CaptureMisconfigured, match="did not hand out its input"):
        capture().keep_final(lambda processor, hidden, *rest: hidden, None, torch.zeros(3, HIDDEN), [], None)


def test_a_mixed_batch_is_cut_into_its_requests_and_nothing_is_left_for_the_answers() -> None:
    here, asked = capture(), [request("a", 3), request("chat", 9, asks=False), request("b", 2)]
    made = result(6, [3, 1, 2])

    here.gather(None, batch(*asked, starts=[0, 8, 0]), made)

    kept = here.writer.samples
    assert [(c.rid, c.parts[0].aux_n3H[:, 0].tolist()) for c in kept] == [("a", [0, 1, 2]), ("b", [4, 5])]
    assert made.logits_output.hidden_states is None


def test_chunks_are_kept_until_the_last() -> None:
    here, long = capture(), request("long", 5, chunks_to_come=1)
    here.gather(None, batch(long, starts=[0]), result(3, [3]))
    waiting = list(here.writer.samples)

    long.inflight_middle_chunks = 0
    here.gather(None, batch(long, starts=[3]), result(2, [2]))

    assert waiting == []
    assert sum(part.tokens for part in here.writer.samples[0].parts) == 5
    assert not hasattr(long, "aerie_states")


@pytest.mark.parametrize(
    "end", [{"to_finish": "abort"}, {"finished": lambda: True}, {"is_retracted": True}, {"inflight_middle_chunks": 1}]
)
def test_states_of_a_request_that_is_given_up_or_taken_back_are_not_written_and_go_when_it_goes(
    end: dict[str, Any],
) -> None:
    here, left = capture(tell=pytest.fail), request("left", 5)
    left.__dict__.update(end)
    here.gather(None, batch(left, starts=[0]), result(5, [5]))
    held = weakref.ref(left.aerie_states)

    del left

    assert (here.writer.samples, held()) == ([], None)


def test_tokens_that_a_prefix_cache_held_are_told_to_the_request_and_nothing_is_written() -> None:
    told: list[dict[str, Any]] = []
    here = capture(tell=told.append)

    here.gather(None, batch(request("a", 40), starts=[39]), result(1, [1]))

    assert [(m["rid"], m["problem"]["code"]) for m in told] == [("a", "capture.incomplete")]
    assert here.writer.samples == []


def test_an_engine_that_returns_fewer_states_than_tokens_is_stopped() -> None:
    with pytest.raises(CaptureMisconfigured, match="a batch of 5 tokens came with states of 4"):
        capture().gather(None, batch(request("a", 5), starts=[0]), result(4, [5]))


@pytest.mark.parametrize("kept", [None, 3], ids=["none at all", "fewer"])
def test_an_engine_that_keeps_fewer_final_states_than_auxiliary_ones_is_stopped(kept: int | None) -> None:
    made = result(4, [4])
    made.logits_output.last_hidden_states = None if kept is None else made.logits_output.last_hidden_states[:kept]

    with pytest.raises(CaptureMisconfigured, match="no final states beside the auxiliary ones"):
        capture().gather(None, batch(request("a", 4), starts=[0]), made)


def test_a_rank_that_writes_nothing_copies_nothing() -> None:
    made = result(4, [4])

    capture(writer=None).copy_final(made, False, True)

    assert (made.logits_output.hidden_states, made.logits_output.last_hidden_states) == (None, None)


def test_states_that_come_before_the_engine_was_confirmed_are_an_error() -> None:
    with pytest.raises(CaptureMisconfigured, match="before the engine was confirmed"):
        capture(confirmed=False).gather(None, batch(request("a", 4), starts=[0]), result(4, [4]))
