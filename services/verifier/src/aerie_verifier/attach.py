"""Which functions of SGLang are hooked, by what, and the proof that they are the functions we know.

The names and parameters below are those of the supported versions. They are looked up before anything is registered: an
engine where one has moved is refused with its name, since SGLang itself would only log it.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from aerie_verifier.config import CaptureMisconfigured, read_config
from aerie_verifier.engine import Capture, engine_version
from aerie_verifier.frontdoor import FrontDoor, offer
from aerie_verifier.mailbox import Mailbox, prepare_address
from aerie_verifier.traffic import Draw, Keeper, Traffic, read_traffic, redaction
from eagle3_core.engine.config import SUPPORTED, CaptureConfig
from eagle3_core.objects.location import store_at

SRT = "sglang.srt"
CONFIRM = f"{SRT}.model_executor.model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture"
FINAL_NORM = f"{SRT}.layers.layer_boundary.residual.batch.final_norm"
KEEP_FINAL = f"{SRT}.layers.logits_processor.LogitsProcessor._get_last_hidden_states_to_store"
COPY = f"{SRT}.managers.utils.GenerationBatchResult.copy_to_cpu"
GATHER = f"{SRT}.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prefill"
MANAGER = f"{SRT}.managers.tokenizer_manager.TokenizerManager"
GENERATE = f"{MANAGER}.generate_request"
CHANGES = (
    "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_distributed",
    "update_weights_from_ipc", "begin_weight_update", "release_memory_occupation",
)  # fmt: skip
"""Methods of the manager that change the weights, or let go of them."""
CHAT_WHOLE = f"{SRT}.entrypoints.openai.serving_chat.OpenAIServingChat._handle_non_streaming_request"
CHAT_STREAMED = f"{SRT}.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream"


@dataclass(frozen=True)
class Hook:
    """One function of the engine and what is put around it."""

    target: str
    kind: Literal["BEFORE", "AFTER", "AROUND"]
    call: Callable[..., Any]
    parameters: tuple[str, ...]
    """The first parameters that the target must have."""


def hooks_of(config: CaptureConfig, capture: Capture, door: FrontDoor) -> list[Hook]:
    """The hooks that capture needs."""
    hooks = [
        Hook(CONFIRM, "AFTER", capture.confirm_layers, ("model", "eagle_use_aux_hidden_state")),
        Hook(COPY, "BEFORE", capture.copy_final, ("self", "return_logprob", "return_hidden_states")),
        Hook(GATHER, "BEFORE", capture.gather, ("self", "batch", "result")),
        Hook(GENERATE, "AROUND", door.generate, ("self", "obj", "request")),
        *(Hook(f"{MANAGER}.{name}", "AROUND", door.keep_weights, ("self", "obj", "request")) for name in CHANGES),
    ]
    if config.final == "pre":
        hooks += [
            Hook(FINAL_NORM, "BEFORE", capture.note_final, ("hidden_states", "forward_batch", "layernorm", "capture")),
            Hook(KEEP_FINAL, "AROUND", capture.keep_final, ("self", "hidden_states")),
        ]
    return hooks


def traffic_hooks(traffic: Traffic) -> list[Hook]:
    """The hooks that keep chats."""
    known = ("self", "adapted_request", "request", "raw_request")
    return [Hook(CHAT_WHOLE, "AROUND", traffic.whole, known), Hook(CHAT_STREAMED, "AROUND", traffic.streamed, known)]


def attach() -> None:
    """Register the hooks. Raises CaptureMisconfigured, TrafficMisconfigured."""
    config, kept = read_config(), read_traffic(os.environ)
    if config is None and kept is None:
        return
    if (version := engine_version()) not in SUPPORTED:
        raise CaptureMisconfigured(
            f"this is SGLang {version}, the plug-in was tested with {', '.join(SUPPORTED)}",
            remedy="install a supported version, or turn capture and traffic off",
        )
    hooks: list[Hook] = []
    if config is not None:
        address = prepare_address()
        capture = Capture(config, address, ())
        hooks += hooks_of(config, capture, FrontDoor(config, Mailbox(address)))
        capture.targets = tuple(hook.target for hook in hooks)
        if multiprocessing.parent_process() is None:  # the one that answers
            offer(config, version)
    if kept is not None:
        keeper = Keeper(kept, store_at(kept.sink), redaction(kept.redact))
        if multiprocessing.parent_process() is None:  # the one that answers; the engine's others load plug-ins too
            keeper.start()
        hooks += traffic_hooks(Traffic(Draw(kept), keeper))
    for hook in hooks:
        _prove(hook)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    for hook in hooks:
        HookRegistry.register(hook.target, hook.call, HookType[hook.kind])


def _prove(hook: Hook) -> None:
    """Raise CaptureMisconfigured unless the target of `hook` exists and takes the parameters that it is known to take."""
    try:
        have = tuple(inspect.signature(pkgutil.resolve_name(hook.target)).parameters)
    except (ImportError, AttributeError) as error:
        raise CaptureMisconfigured(
            f"SGLang {engine_version()} has no {hook.target}: {error}", remedy="use a supported version of SGLang"
        ) from error
    if have[: len(hook.parameters)] != hook.parameters:
        raise CaptureMisconfigured(
            f"{hook.target} takes {', '.join(have)}; known is {', '.join(hook.parameters)}",
            remedy="use a supported version of SGLang",
        )
