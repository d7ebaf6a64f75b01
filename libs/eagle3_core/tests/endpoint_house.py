"""A tiny job that is prepared once, and its generate stage by whatever server a test names."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from running_server import Quirks, RunningServer, running

from eagle3_core.data.tokensets import TokenSet
from eagle3_core.engine import client as client_module
from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.spec import parse_job
from eagle3_core.jobs.wire import ManifestRef, UnitSlice
from eagle3_core.objects.manifest import read_manifest
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.generate import ANSWERS_FILE, generate
from eagle3_core.stages.prepare import prepare
from eagle3_core.testing import stage_context, tiny_job

TRAIN = 6
Serve = Callable[..., RunningServer]


class House:
    """A prepared tiny job, and its generate stage by whatever server a test names."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.document = folder, tiny_job(folder, train=TRAIN)
        self.document["data"] |= {"val_ratio": 0, "bad_rows_limit": 0.2, "unit_samples": TRAIN}
        spec = parse_job(self.asking("http://a", {"api": "openai"}, ask="messages"))
        self.sources = preflight(spec, [folder]).sources
        self.prepared = prepare(stage_context(folder, "prepare", spec, sources=self.sources)).output.manifest

    def asking(self, url: str, endpoint: dict[str, Any], **regenerate: Any) -> dict[str, Any]:
        verifier, data = dict(self.document["verifier"]), dict(self.document["data"])
        verifier["endpoint"] = {"url": url, **endpoint}
        data["regenerate"] = {"max_new_tokens": 12, **regenerate}
        return {**self.document, "verifier": verifier, "data": data}

    def context(self, server: RunningServer | str, endpoint: dict[str, Any], **regenerate: Any) -> StageContext:
        document = self.asking(server if isinstance(server, str) else server.url, endpoint, **regenerate)
        unit = UnitSlice(index=0, start=0, stop=TRAIN, of=1)
        inputs: dict[Any, list[ManifestRef]] = {"prepare": [self.prepared]}
        return stage_context(self.folder, "generate", document, sources=self.sources, inputs=inputs, unit=unit)

    @property
    def prompts(self) -> TokenSet:
        ctx = self.context("http://a", {})
        return TokenSet.load(ctx.fetch(read_manifest(ctx.store, self.prepared).file("train.safetensors")))

    @contextmanager
    def serving(self, monkeypatch: pytest.MonkeyPatch) -> Generator[Serve]:
        """Starts servers with some quirks, each listed as the operator would list it."""
        monkeypatch.setattr(client_module, "PAUSE_S", 0.001)
        with ExitStack() as servers:

            def start(**quirks: Any) -> RunningServer:
                server = servers.enter_context(running(self.folder / "verifier", Quirks(**quirks)))
                monkeypatch.setenv("AERIE_ENDPOINTS", server.url)
                return server

            yield start


def answers_of(ctx: StageContext) -> tuple[TokenSet, dict[str, Any]]:
    commit = generate(ctx)
    manifest = read_manifest(ctx.store, commit.output.manifest)
    return TokenSet.load(ctx.fetch(manifest.file(ANSWERS_FILE))), commit.output.result


def expected(server: RunningServer, house: House) -> dict[str, list[int]]:
    """Prompt and answer by sample, as the server's rule makes them."""
    prompts = {name: house.prompts.sample(i)[0].tolist() for i, name in enumerate(house.prompts.ids)}
    return {name: [*ids, *server.answer(ids, 12, None, 0)[0]] for name, ids in prompts.items()}
