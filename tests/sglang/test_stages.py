"""generate and extract of a job on a real SGLang server: the same answers and states as on transformers, whatever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from references import cosine

import aerie_verifier
from eagle3_core.data.tokensets import TokenSet
from eagle3_core.engine.server import Server
from eagle3_core.jobs.graph import StageName
from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.spec import parse_job
from eagle3_core.jobs.wire import Progress
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import Manifest, fetch_file, read_manifest
from eagle3_core.shards.manifest import contract_of
from eagle3_core.shards.reader import ShardSet
from eagle3_core.stages.chain import Chain, Outcome
from eagle3_core.stages.context import Warm
from eagle3_core.stages.generate import ANSWERS_FILE
from eagle3_core.testing import RecordingReporter, tiny_job
from eagle3_core.verifier.sglang import SGLangVerifier

SAMPLES = 24
ENGINE = {"kv_cache_tokens": 16384, "max_running_requests": 8, "chunked_prefill_tokens": 32, "in_flight": 8}


@pytest.fixture(scope="module", autouse=True)
def engine_settings(cpu_engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A worker's settings, with a scratch folder that a test can look into."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AERIE_SCRATCH", str(tmp_path_factory.mktemp("scratch")))
        yield


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """What a child keeps between units: all jobs here have one verifier, and share its server."""
    kept = Warm()
    yield kept
    kept.release()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    job = tiny_job(folder, train=SAMPLES)
    job["data"] |= {"unit_samples": SAMPLES // 2, "val_ratio": 0}
    return job


class Run:
    """A chain of stages, with what they committed."""

    def __init__(self, folder: Path, name: str, document: dict[str, Any], warm: Warm, reporter: Any = None) -> None:
        self.folder, self.reporter = folder / name, reporter or RecordingReporter()
        self.store = LocalStore(self.folder / "objects")
        self.chain = Chain(
            parse_job(document), self.store, self.folder, [folder], warm=warm, reporter=self.reporter,
            sources=preflight(parse_job(document), [folder]).sources,
        )  # fmt: skip

    def manifests(self, stage: StageName) -> list[Manifest]:
        outcome: Outcome = self.chain.run(stage)
        return [read_manifest(self.store, output.manifest) for output in outcome.outputs]

    def answers(self) -> TokenSet:
        return TokenSet.concat(
            [
                TokenSet.load(fetch_file(self.store, m.file(ANSWERS_FILE), self.folder))
                for m in self.manifests("generate")
            ]
        )

    def shards(self) -> ShardSet:
        return ShardSet(self.store, self.manifests("extract"), self.folder)

    @property
    def log(self) -> str:
        return "\n".join(line.text for line in self.reporter.lines)


def on_sglang(document: dict[str, Any]) -> dict[str, Any]:
    return document | {"verifier": document["verifier"] | {"backend": "sglang", "engine": ENGINE}}


@pytest.fixture(scope="module")
def served(folder: Path, document: dict[str, Any], warm: Warm) -> Run:
    run = Run(folder, "sglang", on_sglang(document), warm)
    run.chain.run("extract")
    return run


@pytest.fixture
def server(served: Run, folder: Path, document: dict[str, Any], warm: Warm) -> Server:
    """The server that `served` asked, or another of its kind where a later stage let that one go."""
    if not any(isinstance(held, SGLangVerifier) for held in warm.held.values()):
        Run(folder, "again", on_sglang(document), warm).chain.run("extract")
    return next(held for held in warm.held.values() if isinstance(held, SGLangVerifier)).server()


@pytest.fixture(scope="module")
def reference(folder: Path, document: dict[str, Any]) -> Run:
    run = Run(folder, "transformers", document, Warm())
    run.chain.run("extract")
    return run


def test_the_engines_answers_are_the_verifiers_own_token_by_token(served: Run, reference: Run) -> None:
    have, want = served.answers(), reference.answers()

    assert have.ids == want.ids
    for i in range(len(want)):
        assert [part.tolist() for part in have.sample(i)] == [part.tolist() for part in want.sample(i)]


def test_states_of_the_engine_equal_those_of_transformers_at_every_token_and_layer(served: Run, reference: Run) -> None:
    have, want = served.shards(), reference.shards()
    by_id = {sample.id: sample for sample in map(want.sample, range(len(want)))}

    worst = 1.0
    for sample in map(have.sample, range(len(have))):
        other = by_id.pop(sample.id)
        assert sample.input_ids.tolist() == other.input_ids.tolist()
        assert sample.loss_mask.tolist() == other.loss_mask.tolist()
        assert sample.final_index.tolist() == other.final_index.tolist()
        pairs = [*zip(sample.aux.chunk(3, -1), other.aux.chunk(3, -1), strict=True), (sample.final, other.final)]
        worst = min(worst, *(cosine(a, b) for a, b in pairs))
    assert not by_id
    assert worst >= 0.99999


def test_samples_lie_in_the_order_of_the_answers_whatever_order_the_engine_found_best(served: Run) -> None:
    shards = served.shards()

    assert [shards.sample(i).id for i in range(len(shards))] == served.answers().ids


def test_shards_say_which_engine_captured_them_and_what_was_checked(served: Run, reference: Run) -> None:
    have, want = (contract_of(run.manifests("extract")[0]) for run in (served, reference))
    result = served.chain.run("extract").result

    assert (have.engine, have.engine_version, have.capture_pass, have.dtype) == (
        "sglang", "0.5.23", "prefill", "float32",
    )  # fmt: skip
    assert (have.plugin_version, want.plugin_version) == (aerie_verifier.__version__, None)
    assert (have.verifier, have.aux_layers, have.final) == (want.verifier, want.aux_layers, want.final)
    assert result["samples"] == SAMPLES
    assert result["checked"] == result["agreed"] > SAMPLES


class Assassin(RecordingReporter):
    """A reporter that kills the engine, all its processes, once some states of the stage have come."""

    def __init__(self, warm: Warm, after: int) -> None:
        super().__init__()
        self._warm, self._after, self.killed = warm, after, 0

    def progress(self, progress: Progress) -> None:
        super().progress(progress)
        if not self.killed and progress.unit == "samples" and progress.done >= self._after:
            (verifier,) = self._warm.held.values()
            assert isinstance(verifier, SGLangVerifier)
            self.killed = verifier.server().pid
            os.killpg(self.killed, signal.SIGKILL)


def test_extraction_goes_on_over_the_death_of_its_server_and_no_sample_is_lost_or_doubled(
    served: Run, folder: Path, document: dict[str, Any], warm: Warm
) -> None:
    answered = on_sglang(document) | {"data": document["data"] | {"unit_samples": SAMPLES}}
    run = Run(folder, "killed", answered, warm)
    run.chain.run("generate")
    killer = run.chain.reporter = run.reporter = Assassin(warm, after=3)

    shards = run.shards()

    assert killer.killed
    assert "requests are asked again" in run.log
    assert sorted(shards.sample(i).id for i in range(len(shards))) == sorted(run.answers().ids)
    before = served.shards()
    for i in range(len(before)):
        torch.testing.assert_close(shards.sample(i).aux, before.sample(i).aux, rtol=0.02, atol=0.02)


def test_nothing_of_the_states_is_left_where_they_passed_through(served: Run) -> None:
    assert not list(Path(os.environ["AERIE_SCRATCH"]).rglob("*.safetensors"))


def test_sampled_answers_differ_from_greedy_ones_and_are_captured_too(
    served: Run, folder: Path, document: dict[str, Any], warm: Warm
) -> None:
    job = on_sglang(document)
    job["data"] = document["data"] | {
        "regenerate": {**document["data"]["regenerate"], "temperature": 1.0, "top_p": 0.9}, "max_samples": 8,
    }  # fmt: skip

    run = Run(folder, "sampled", job, warm)

    greedy = {name: served.answers().sample(i)[0].tolist() for i, name in enumerate(served.answers().ids)}
    answers = run.answers()
    assert any(answers.sample(i)[0].tolist() != greedy.get(name) for i, name in enumerate(answers.ids))
    assert run.chain.run("extract").result["checked"] == len(answers)  # what the engine itself said comes next


WAYS = {
    "sglang": ({}, {}), "completions": ({"api": "openai"}, {}), "chat": ({"api": "openai"}, {"ask": "messages"}),
    "completions as text": ({"api": "openai", "retokenize": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_running_server_writes_the_same_answers_and_gives_the_same_states_and_no_other_one_is_started(
    way: str, served: Run, server: Server, folder: Path, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.config.capture is not None
    url = server.url
    monkeypatch.setenv("AERIE_ENDPOINTS", url)
    monkeypatch.setenv("AERIE_CAPTURE_SINKS", str(server.config.capture.sink))
    endpoint, asked = WAYS[way]
    job = on_sglang(document)
    job["verifier"] |= {"endpoint": {"url": url, **endpoint}}
    job["data"] = document["data"] | {"regenerate": {**document["data"]["regenerate"], **asked}}
    job["extraction"] = {**document.get("extraction", {}), "endpoint": {"url": url}}

    run = Run(folder, way.replace(" ", "-"), job, Warm())

    assert run.answers().ids == served.answers().ids
    for i in range(SAMPLES):
        assert run.answers().sample(i)[0].tolist() == served.answers().sample(i)[0].tolist()
    have, want = run.shards(), served.shards()
    for i in range(SAMPLES):
        torch.testing.assert_close(have.sample(i).aux, want.sample(i).aux, rtol=0.02, atol=0.02)
    assert "starting SGLang" not in run.log
    assert "its tokenizer on" in run.log
    result = run.chain.run("extract").result
    assert result["checked"] == result["agreed"] > SAMPLES
    assert not list(Path(os.environ["AERIE_SCRATCH"]).rglob("*.safetensors"))


def test_the_canary_runs_every_later_stage_with_the_engine(folder: Path, document: dict[str, Any], warm: Warm) -> None:
    run = Run(folder, "canary", on_sglang(document), warm)

    result = run.chain.run("canary").result

    assert [stage["name"] for stage in result["stages"]] == [
        "generate", "extract", "vocab", "train", "evaluate", "package",
    ]  # fmt: skip
    assert "extract: the states give the verifier's next token" in run.log
