"""The verifier on SGLang: the engine that will serve writes the answers and gives the states.

One server does both: it captures by prefill where states are asked for, and decodes as ever where they are not. States
come through a folder, never in an answer; each is held against its receipt and what was asked before it counts.
A server that dies is started again a few times, and only what was not answered yet is asked again. Results come in the
order in which they were asked for (`verifier.captured`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from eagle3_core.engine.capture import capture_request
from eagle3_core.engine.client import Client
from eagle3_core.engine.config import CaptureConfig
from eagle3_core.engine.refusals import ServerFailed
from eagle3_core.engine.server import Server, running_server
from eagle3_core.engine.settings import EngineSettings, require_engine, server_config
from eagle3_core.jobs.spec import VerifierSpec
from eagle3_core.objects.local import LocalStore
from eagle3_core.verifier.base import Captured, Decoding, Generated, Progressed, contract_of_run
from eagle3_core.verifier.captured import Expected
from eagle3_core.verifier.contract import CaptureContract
from eagle3_core.verifier.device import pick_device
from eagle3_core.verifier.identity import Identity
from eagle3_core.verifier.layers import resolve_layers

RESTARTS = 2
"""How often one call starts a server again that died under it. More deaths are no accident."""


class SGLangVerifier:
    """A verifier that an SGLang server of this machine runs. The server starts when it is first needed."""

    keeps_states = False

    def __init__(
        self,
        folder: Path,
        spec: VerifierSpec,
        aux_layers: tuple[int, ...] | None,
        identity: Identity,
        settings: EngineSettings,
    ) -> None:
        """Raises EngineMissing, LayerChoice.

        Call it from a thread that stays: its server ends with the thread that started it.
        """
        self.identity, self.revision, self.spec = identity, spec.revision, spec
        self.say: Callable[[str], None] = lambda line: None
        """Hears when a server starts, and starts again."""
        self.go_on: Callable[[], None] = lambda: None
        """Raises to stop waiting for a server."""
        self.aux_layers = resolve_layers(aux_layers, identity.num_layers)
        self.engine_version, self.plugin_version = require_engine(settings)
        self._settings = settings
        settings.scratch.mkdir(parents=True, exist_ok=True)
        self._folder = TemporaryDirectory(prefix="states-", dir=settings.scratch, ignore_cleanup_errors=True)
        self._sink = LocalStore(Path(self._folder.name))
        self._capture = CaptureConfig(sink=self._sink.root.as_uri(), aux_layers=self.aux_layers)
        self._config = server_config(spec, folder, pick_device(spec.device), settings, capture=self._capture)
        self._running = ExitStack()
        self._server: Server | None = None

    def close(self) -> None:
        """End the server and forget what it captured."""
        self._server = None
        self._running.close()
        self._folder.cleanup()

    def server(self) -> Server:
        """The server, started if none lives. Raises ServerFailed with the end of its log, and what `go_on` raises."""
        if self._server is not None and not self._server.alive:
            self._server = None
            self._running.close()
        if self._server is None:
            self.say(f"starting SGLang {self.engine_version} with {self.identity.name} in {self.spec.dtype}")
            start = running_server(self._config, self._settings, say=self.say, go_on=self.go_on)
            self._server = self._running.enter_context(start)
            self.say(f"SGLang serves at {self._server.url}")
        return self._server

    def contract(self, capture_pass: Literal["decode", "prefill"]) -> CaptureContract:
        """How this engine captures. Starts the server, whose own settings are part of it."""
        said: Mapping[str, Any] = self.server().client.get("/server_info")
        kv = said.get("kv_cache_dtype")
        return contract_of_run(
            self.identity,
            revision=self.revision,
            aux_layers=self.aux_layers,
            dtype=self.spec.dtype,
            kv_cache_dtype=self.spec.dtype if kv in (None, "auto") else str(kv).removeprefix("torch."),
            attention=str(said.get("attention_backend") or "unknown"),
            parallel=f"tp{self.spec.tensor_parallel}",
            engine="sglang",
            engine_version=self.engine_version,
            plugin_version=self.plugin_version,
            capture_pass=capture_pass,
        )

    def generate(self, prompts: Sequence[Sequence[int]], how: Decoding, on_progress: Progressed) -> Iterator[Generated]:
        """Answers as the engine writes them, without states. Raises ServerFailed, and what `on_progress` raises."""
        bodies = [
            {"input_ids": list(prompt), "sampling_params": sampling(how, len(prompt))} for prompt in prompts
        ]  # fmt: skip
        for place, answer in self._answers(bodies, on_progress):
            yield generated(place, prompts[place], answer)

    def capture(
        self, sequences: Sequence[Sequence[int]], *, batch_tokens: int, on_progress: Progressed
    ) -> Iterator[Captured]:
        """States in the engine's own precision, by prefill. The engine makes its own batches, whatever `batch_tokens`.

        Raises ServerFailed, ReceiptWrong, and what the capture plug-in answers.
        """
        bodies = [capture_request(ids) for ids in sequences]
        expected = Expected(
            self._sink, self.aux_layers, self._capture.final, self.spec.dtype, self.engine_version,
            self.plugin_version, self.identity.hidden_size,
        )  # fmt: skip
        try:
            yield from expected.in_order(self._answers(bodies, on_progress), sequences)
        finally:
            self._sweep()

    def _sweep(self) -> None:
        """Forget states that nobody waits for: those whose answers went with a server that died, or were given up."""
        for left in list(self._sink.list("")):
            self._sink.delete(left.key)

    def _answers(self, bodies: Sequence[Mapping[str, Any]], on_progress: Progressed) -> Iterator[tuple[int, Any]]:
        """The answer to each of `bodies`, once, in any order; over the deaths of some servers."""
        left = dict(enumerate(bodies))
        tokens = deaths = 0

        def report() -> None:
            on_progress(done=len(bodies) - len(left), tokens=tokens)

        while left:
            server = self.server()
            try:
                for place, answer in ask(server.client, server, left, self.spec.engine.in_flight, report):
                    del left[place]
                    meta = answer["meta_info"]
                    tokens += int(meta["prompt_tokens"]) + int(meta["completion_tokens"])
                    yield place, answer
                    report()
            except ServerFailed as error:
                if server.alive or deaths == RESTARTS:
                    raise
                deaths += 1
                self.say(f"{error.detail.splitlines()[0]}; {len(left)} of {len(bodies)} requests are asked again")


def ask(
    client: Client, server: Server, left: Mapping[int, Mapping[str, Any]], most: int, report: Callable[[], None]
) -> Iterator[tuple[int, Any]]:
    """The answers to what is `left`, by its places. Raises ServerFailed as soon as `server` has ended."""

    def check() -> None:
        server.check()
        report()

    places = list(left)
    for at, answer in client.each([left[place] for place in places], most=most, check=check):
        why = answer["meta_info"].get("finish_reason") or {}
        if why.get("type") == "abort":
            raise ServerFailed(
                f"the engine gave a request up: {why.get('message') or 'it does not say why'}",
                remedy="see what it says; a smaller verifier.engine.in_flight or more KV cache may help",
            )
        yield places[at], answer


def sampling(how: Decoding, prompt_len: int) -> dict[str, Any]:
    """The engine's sampling parameters for an answer to a prompt of `prompt_len` tokens."""
    return {
        "temperature": how.temperature, "top_p": how.top_p, "max_new_tokens": how.limit(prompt_len),
        "stop_token_ids": list(how.eos_ids),
    }  # fmt: skip


def generated(index: int, prompt: Sequence[int], answer: Mapping[str, Any]) -> Generated:
    """The engine's answer with the ids that it sampled: nothing is tokenised again."""
    ended = (answer["meta_info"].get("finish_reason") or {}).get("type") == "stop"
    return Generated(index, [*prompt, *map(int, answer["output_ids"])], len(prompt), ended, None)
