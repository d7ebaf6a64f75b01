"""The hooks where requests come in and answers go out: a request for hidden states is admitted, and answered by a receipt.

Admitted is one prompt and one token of answer: the states of a prefill are what is captured. Each such request gets a
cache key of its own, so no prefix cache can hold any of its tokens. Its answer waits until the states lie in the sink.

Receipts and contracts name one checkpoint. So a request may bring nothing but tokens, and whoever would give a capturing
server other weights is refused: states of before and after would lie in one sink, and in one long prompt.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NoReturn

from aerie_verifier import __version__
from aerie_verifier.mailbox import Mailbox
from eagle3_core.engine.config import CaptureConfig
from eagle3_core.errors import AerieError
from eagle3_core.verifier.receipt import CAPTURE_ROUTE, PROTOCOL, RECEIPT_FIELD, CaptureFacts

HTTP_SERVER = "sglang.srt.entrypoints.http_server"
REQUEST_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,127}")
NOT_TOKENS = (
    "input_embeds", "image_data", "video_data", "audio_data", "lora_path", "session_params", "positional_embed_overrides",
)  # fmt: skip
"""Fields of a request that give its tokens other states than the verifier's own of these tokens alone."""


class CaptureRefused(AerieError):
    """This request for hidden states cannot be carried out."""

    code, status = "capture.request", 400


class WeightsFixed(AerieError):
    """A server that captures keeps the weights that it started with."""

    code, status = "capture.weights", 409


class CaptureMissing(AerieError):
    """The engine answered, but its states did not reach the sink."""

    code, status, retryable = "capture.missing", 500, True


def offer(config: CaptureConfig, engine_version: str) -> None:
    """Have the server say how it captures, to whoever would use it without having started it (GET `/aerie/capture`).

    The engine loads plug-ins before its HTTP server, which is imported here; within another program nobody will ask it.
    """
    app = importlib.import_module(HTTP_SERVER).app
    facts = CaptureFacts(
        protocol=PROTOCOL, plugin_version=__version__, engine_version=engine_version, aux_layers=config.aux_layers,
        final=config.final, sink=config.sink,
    )  # fmt: skip

    async def say() -> dict[str, Any]:
        return facts.model_dump(mode="json")

    app.add_api_route(CAPTURE_ROUTE, say, methods=["GET"])


def refuse(error: AerieError) -> NoReturn:
    """Answer with `error`: the status is its own, the message is its problem document."""
    from fastapi import HTTPException

    raise HTTPException(error.status, json.dumps(error.problem()))


def check(request: Any) -> None:
    """Raise CaptureRefused unless `request` is one prompt with an answer of one token."""
    wrong: str | None = None
    params = request.sampling_params if request.sampling_params is not None else {}
    if request.return_hidden_states is not True:
        wrong = f"return_hidden_states is {request.return_hidden_states!r}, a capturing server knows true and false"
    elif _is_batch(request):
        wrong = "the request holds several prompts"
    elif not isinstance(params, dict) or params.get("n", 1) != 1 or params.get("max_new_tokens") != 1:
        wrong = "sampling_params must ask for one answer of max_new_tokens 1"
    elif request.stream:
        wrong = "the answer to a capture is not streamed"
    elif brought := [name for name in NOT_TOKENS if getattr(request, name, None)]:
        wrong = f"{', '.join(brought)} would change the states, which are the verifier's of the tokens alone"
    elif request.rid is not None and not (isinstance(request.rid, str) and REQUEST_ID.fullmatch(request.rid)):
        wrong = f"rid {request.rid!r:.80} can be no part of a key"
    if wrong is not None:
        raise CaptureRefused(wrong, remedy='send one prompt with "sampling_params": {"max_new_tokens": 1}')


def _is_batch(request: Any) -> bool:
    ids = request.input_ids
    return isinstance(request.text, list) or bool(ids and isinstance(ids[0], list))


@dataclass
class FrontDoor:
    """Capture in the process that answers requests."""

    config: CaptureConfig
    mailbox: Mailbox

    def generate(self, original: Any, manager: Any, request: Any, http: Any = None) -> AsyncIterator[Any]:
        """The answers to `request`; the engine's own where no states are asked for."""
        if getattr(request, "return_hidden_states", False) is False:
            return original(manager, request, http)
        return self._capture(original, manager, request, http)

    async def keep_weights(self, original: Any, manager: Any, request: Any, http: Any = None) -> NoReturn:
        """The answer to whoever would change the model."""
        refuse(
            WeightsFixed(
                f"{original.__name__} would change the model whose states this server captures",
                remedy="stop the server and start it with the other checkpoint: its receipts name one",
            )
        )

    async def _capture(self, original: Any, manager: Any, request: Any, http: Any) -> AsyncIterator[Any]:
        try:
            check(request)
        except CaptureRefused as error:
            refuse(error)
        request.rid = request.rid or uuid.uuid4().hex
        request.extra_key = f"{request.extra_key or ''}aerie-{uuid.uuid4().hex}"
        coming = self.mailbox.expect(request.rid)
        try:
            async for answer in original(manager, request, http):
                yield await self._with_receipt(answer, coming)
        finally:
            self.mailbox.forget(request.rid)

    async def _with_receipt(self, answer: dict[str, Any], coming: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
        meta: dict[str, Any] = answer["meta_info"]
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            return answer
        if meta.pop("hidden_states", None):
            refuse(
                CaptureMissing("the engine sent hidden states itself", remedy="its hooks are not attached: restart it")
            )
        try:
            message = await asyncio.wait_for(coming, self.config.receipt_s)
        except TimeoutError:
            wait = f"no receipt came within {self.config.receipt_s:g} s"
            refuse(CaptureMissing(wait, remedy="look at the sink and at the engine's log, then send the request again"))
        if problem := message.get("problem"):
            refuse(AerieError.from_problem(problem))
        return {**answer, "meta_info": {**meta, RECEIPT_FIELD: message["receipt"]}}
