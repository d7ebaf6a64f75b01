"""The verifier's states as somebody else captures them: a running SGLang server with our plug-in, and a sink that both reach.

Before the first prompt the server says how it captures (`/aerie/capture`), which must be as the job's contract says, and one
capture travels the whole way. The sink is the server's choice and this process reads from it, so it must be one that the
operator allows: a folder under the roots, or a place that he lists. Nothing in it is touched but what was asked for.

    AERIE_CAPTURE_SINKS   sinks of running servers, as `s3://bucket/prefix?endpoint=https://host`, separated by spaces;
                          folders under AERIE_FILE_ROOTS need no entry
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from eagle3_core.data.sources import SourceNotAllowed, SourceScheme, resolve
from eagle3_core.engine.allowed import STATES_AT
from eagle3_core.engine.capture import capture_request, receipt_of
from eagle3_core.engine.client import Client
from eagle3_core.engine.config import SUPPORTED
from eagle3_core.engine.heard import cut, naming, part, part_or
from eagle3_core.engine.proof import Proof
from eagle3_core.engine.refusals import RequestRefused, ServerFailed
from eagle3_core.engine.server import PROOF
from eagle3_core.errors import AerieError
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.objects.location import store_at
from eagle3_core.objects.protocol import ObjectMissing, ObjectStore
from eagle3_core.verifier.base import Captured, Progressed, contract_of_run
from eagle3_core.verifier.captured import Expected
from eagle3_core.verifier.contract import CaptureContract
from eagle3_core.verifier.identity import Identity
from eagle3_core.verifier.layers import resolve_layers
from eagle3_core.verifier.receipt import CAPTURE_ROUTE, PROTOCOL, CaptureFacts


class CaptureNotOffered(AerieError):
    """A server that is to give states has no capture plug-in, or its capture is off."""

    code, status = "endpoint.no_capture", 409


class CaptureDiffers(AerieError):
    """A server captures otherwise than the job's contract says."""

    code, status = "endpoint.capture", 409


class SinkUnreachable(AerieError):
    """A server writes its states to where the worker may not or cannot read."""

    code, status = "endpoint.sink", 409


@dataclass
class EndpointStates:
    """States of one unit's samples by the server that the job names."""

    client: Client
    spec: JobSpec
    identity: Identity
    file_roots: Sequence[Path]
    say: Callable[[str], None] = lambda line: None
    check: Callable[[], None] = lambda: None
    """Raises to stop waiting."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    keeps_states: bool = False

    @cached_property
    def aux_layers(self) -> tuple[int, int, int]:
        """The layer inputs that the job wants."""
        return resolve_layers(self.spec.extraction.aux_layers, self.identity.num_layers)

    @cached_property
    def facts(self) -> CaptureFacts:
        """How the server captures, once it is proved to be as the job wants it, by a capture that came the whole way.

        Raises OtherVerifier, CaptureNotOffered, CaptureDiffers, SinkUnreachable, ReceiptWrong.
        """
        compared = self._proof.require_verifier(self._proof.look("sglang"))
        facts = self._said()
        for name, have, want in (
            ("protocol", facts.protocol, (PROTOCOL,)), ("SGLang", facts.engine_version, SUPPORTED),
            ("layers", list(facts.aux_layers), (list(self.aux_layers),)), ("final norm", facts.final, ("pre",)),
        ):  # fmt: skip
            if have not in want:
                raise CaptureDiffers(
                    f"{self.client.url} captures with {name} {cut(have)}, the job wants {' or '.join(map(str, want))}",
                    remedy=self._remedy(), pointer=STATES_AT,
                )  # fmt: skip
        self._try(facts)
        self.say(
            f"{self.client.url} captures for us into {cut(facts.sink)}: compared were {', '.join(compared)}, and its capture"
        )
        return facts

    def contract(self, capture_pass: Literal["decode", "prefill"]) -> CaptureContract:
        """How the server captures. Raises as `facts`."""
        facts = self.facts
        said = self._proof.look("sglang").info
        kv = said.get("kv_cache_dtype")
        return contract_of_run(
            self.identity,
            revision=self.spec.verifier.revision,
            aux_layers=self.aux_layers,
            dtype=self.spec.verifier.dtype,
            kv_cache_dtype=self.spec.verifier.dtype
            if kv in (None, "auto")
            else cut(str(kv).removeprefix("torch."), 40),
            attention=cut(str(said.get("attention_backend") or "unknown"), 40),
            parallel=f"tp{cut(said.get('tp_size') or 1, 40)}",
            engine="sglang",
            engine_version=facts.engine_version,
            plugin_version=facts.plugin_version,
            capture_pass=capture_pass,
        )

    def capture(
        self, sequences: Sequence[Sequence[int]], *, batch_tokens: int, on_progress: Progressed
    ) -> Iterator[Captured]:
        """See Verifier. The server makes its own batches, whatever `batch_tokens`. Raises as `facts`, and what it answers."""
        facts = self.facts
        with naming(self.client.url):
            yield from self._expected(facts).in_order(self._answers(sequences, on_progress), sequences)
        if (now := self._said()) != facts:
            raise CaptureDiffers(
                f"{self.client.url} captured with {cut(facts.model_dump())} at first and {cut(now.model_dump())} at last",
                remedy="let the server be while a unit runs; the unit is to be run again", pointer=STATES_AT,
            )  # fmt: skip
        _ = self._proof.require_verifier(self._proof.look("sglang"))

    @property
    def _proof(self) -> Proof:
        address = self.spec.extraction.endpoint
        assert address is not None
        return Proof(self.client, address, STATES_AT, self.identity, self.spec.verifier.dtype, self.check)

    def _answers(
        self, sequences: Sequence[Sequence[int]], on_progress: Progressed
    ) -> Iterator[tuple[int, Mapping[str, Any]]]:
        bodies = [capture_request(ids) for ids in sequences]
        done = tokens = 0

        def report() -> None:
            on_progress(done=done, tokens=tokens)

        for place, answer in self.client.each(bodies, most=self._proof.address.in_flight, check=report):
            why = part_or(part(answer, "meta_info", dict), "finish_reason", dict[str, Any]())
            if why.get("type") == "abort":
                raise ServerFailed(
                    f"{self.client.url} gave a request up: {cut(why.get('message') or 'it does not say why')}",
                    remedy="see what it says; a smaller extraction.endpoint.in_flight may help",
                )
            done += 1
            tokens += len(sequences[place])
            yield place, answer
            report()

    def _said(self) -> CaptureFacts:
        """What the plug-in says. Raises CaptureNotOffered, CaptureDiffers."""
        try:
            said = self.client.patiently(CAPTURE_ROUTE, None, self.check)
        except RequestRefused as error:
            if type(error) is not RequestRefused:
                raise
            raise CaptureNotOffered(
                f"{self.client.url} has no {CAPTURE_ROUTE}: it runs without our capture plug-in, or with capture off",
                remedy=self._remedy(), pointer=STATES_AT,
            ) from None  # fmt: skip
        try:
            return CaptureFacts.model_validate(said)
        except ValidationError as error:
            raise CaptureDiffers(
                f"{self.client.url}{CAPTURE_ROUTE} does not validate: {cut(error.errors()[0]['msg'])}",
                remedy="run the server's plug-in and the stages from one version", pointer=STATES_AT,
            ) from None  # fmt: skip

    def _remedy(self) -> str:
        """The command that starts such a server."""
        config = {
            "model": str(self.identity.folder), "dtype": self.spec.verifier.dtype,
            "capture": {"sink": "file:///shared/states", "aux_layers": list(self.aux_layers)},
        }  # fmt: skip
        return f"start it by `aerie-verifier server.json`, where server.json is {json.dumps(config)} with a sink that the workers reach"

    def _expected(self, facts: CaptureFacts) -> Expected:
        return Expected(
            self._sink(facts.sink), self.aux_layers, facts.final, self.spec.verifier.dtype, facts.engine_version,
            facts.plugin_version, self.identity.hidden_size,
        )  # fmt: skip

    def _sink(self, url: str) -> ObjectStore:
        """The store at `url`, which a server named. Raises SinkUnreachable unless the operator allows it."""
        listed = [sink.rstrip("/") for sink in self.environment.get("AERIE_CAPTURE_SINKS", "").split()]
        if url.rstrip("/") not in listed:
            try:
                _ = resolve(url, self.file_roots)
            except (SourceScheme, SourceNotAllowed) as error:
                raise SinkUnreachable(
                    f"{self.client.url} writes its states where this worker may not read: {error.detail}",
                    remedy="let it write under one of the worker's AERIE_FILE_ROOTS, or have the operator list its sink in"
                    " AERIE_CAPTURE_SINKS",
                    pointer=STATES_AT,
                ) from None
        return store_at(url, self.environment)

    def _try(self, facts: CaptureFacts) -> None:
        """One capture, from the request to its states in this process."""
        answer = self.client.patiently("/generate", capture_request(PROOF), self.check)
        with naming(self.client.url):
            receipt = receipt_of(answer, PROOF)
        try:
            with naming(self.client.url):
                _ = self._expected(facts).take(receipt, PROOF)
        except ObjectMissing as error:
            raise SinkUnreachable(
                f"{self.client.url} says that {cut(receipt.key)} lies in {cut(facts.sink)}, and this worker finds nothing there",
                remedy="mount the same folder at the same path on both machines, or use an s3 sink",
                pointer=STATES_AT,
            ) from error
