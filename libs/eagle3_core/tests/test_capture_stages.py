"""generate, extract and evaluate as stages: what they commit, under which keys, and what they refuse."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.data.tokensets import TokenSet
from eagle3_core.drafter.config import drafter_config, read_text_config
from eagle3_core.drafter.export import ExportMismatch
from eagle3_core.drafter.model import CONFIG_FILE, TENSORS_FILE, Drafter
from eagle3_core.drafter.tensors import tensor_shapes
from eagle3_core.drafter.verifier_parts import VerifierParts
from eagle3_core.jobs.graph import Slice, StageName, unit_inputs, unit_key
from eagle3_core.jobs.refusals import Preempted
from eagle3_core.jobs.results import reduce
from eagle3_core.jobs.room import StoreTooSmall
from eagle3_core.jobs.wire import Commit, ManifestRef, Output, UnitSlice
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import UnitWriter, read_manifest
from eagle3_core.shards.manifest import contract_of
from eagle3_core.shards.reader import ShardSet
from eagle3_core.stages.context import StageContext, Warm
from eagle3_core.stages.evaluate import evaluate
from eagle3_core.stages.extract import extract
from eagle3_core.stages.generate import generate
from eagle3_core.stages.prepare import states_need
from eagle3_core.testing import RecordingReporter, stage_context, tiny_job, tiny_verifier
from eagle3_core.verifier.contract import CaptureContract, ContractMismatch
from eagle3_core.verifier.folder import VerifierChanged
from eagle3_core.verifier.identity import inspect
from eagle3_core.verifier.transformers import TransformersVerifier

torch.set_num_threads(1)  # tiny products: a second thread only waits, and waits long on a busy machine

WARM = Warm()
"""Shared by the tests, as a child shares it between units; another verifier takes its place."""


class Job:
    """A tiny job with prepared samples, whose stages can be run one by one."""

    def __init__(self, folder: Path, *, regenerate: bool = True) -> None:
        self.folder = folder
        self.document = tiny_job(folder, answered=not regenerate)
        self.identity = inspect(folder / "verifier")
        self.sources = {"verifier": self.identity.digest}
        samples = [
            (f"s{i}", "ab"[i % 2], [1, 9, 30 + i, 40, 3 * i + 7][: 3 + i % 3], [0] * (3 + i % 3)) for i in range(6)
        ]
        if not regenerate:
            samples = [(name, task, [*ids, 50, 51, 2], [*mask, 1, 1, 1]) for name, task, ids, mask in samples]
        self.train = TokenSet.build(samples)
        self.held_out = TokenSet.build([(f"e{i}", "ab"[i % 2], [1, 9, 60 + i, 41], [0] * 4) for i in range(3)])
        self.refs: dict[StageName, list[ManifestRef]] = {"prepare": [self._prepare()]}
        self.results: dict[StageName, dict[str, Any]] = {}

    def _writer(self, stage: StageName) -> UnitWriter:
        store = stage_context(self.folder, stage, self.document).store
        return UnitWriter(store, tenant="tenant", job_id="job", stage=stage, unit=(0, 0, 1), unit_key="k", fence=1)

    def _prepare(self) -> ManifestRef:
        writer = self._writer("prepare")
        for name, tokens in (("train", self.train), ("eval", self.held_out)):
            tokens.save(self.folder / f"{name}.safetensors")
            writer.add_file(f"{name}.safetensors", self.folder / f"{name}.safetensors")
        return writer.commit({"samples": len(self.train), "eval_prompts": len(self.held_out)})

    def context(self, stage: StageName, start: int, stop: int, **changes: Any) -> StageContext:
        unit = UnitSlice(index=0, start=start, stop=stop, of=1)
        ctx = stage_context(
            self.folder, stage, self.document, sources=self.sources, inputs=self.refs, unit=unit,
            results=self.results, **changes,
        )  # fmt: skip
        ctx.warm = WARM
        return ctx

    def trained(self, contract: CaptureContract) -> None:
        """A drafter with random weights, committed as train commits one."""
        config = drafter_config(
            read_text_config(self.folder / "verifier"), algorithm="eagle3.1", aux_layers=contract.aux_layers,
            draft_vocab_size=320, ttt_steps=3,
        )  # fmt: skip
        draw = torch.Generator().manual_seed(1)
        weights = {
            name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=draw) / shape[-1] ** 0.5
            for name, shape in tensor_shapes(config).items()
        }
        identity_map = torch.zeros(320, dtype=torch.int64), torch.ones(320, dtype=torch.bool)
        embedding = VerifierParts(self.folder / "verifier").embedding()
        drafter = Drafter.assemble(config, weights, embedding, *identity_map)
        drafter.save(self.folder / "drafter")
        self.results["train"] = {"digest": drafter.digest()}
        writer = self._writer("train")
        for name in (TENSORS_FILE, CONFIG_FILE):
            writer.add_file(name, self.folder / "drafter" / name)
        self.refs["train"] = [writer.commit({}, contract=contract.model_dump(mode="json"))]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def manifest(ctx: StageContext, commit: Commit):
    return read_manifest(ctx.store, commit.output.manifest)


def test_generate_answers_its_slice_and_commits_the_states_of_that_pass_as_extracts_output(job):
    ctx = job.context("generate", 1, 5)

    commit = generate(ctx)

    answers = TokenSet.load(ctx.fetch(manifest(ctx, commit).file("answers.safetensors")))
    assert answers.ids == job.train.ids[1:5]
    for i in range(4):
        prompt, (ids, mask) = job.train.sample(i + 1)[0], answers.sample(i)
        assert ids[: len(prompt)].tolist() == prompt.tolist()
        assert mask.tolist() == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    assert commit.output.result["answer_tokens"] == answers.supervised_tokens
    (states,) = commit.also
    inputs = unit_inputs("extract", ctx.spec, 0, {"generate": [commit.output.manifest.content], "prepare": ["x"]})
    assert states.key == unit_key("extract", ctx.spec, Slice(0, 1, 5), inputs, job.sources, "tenant")
    assert states.result["pass"] == "decode"
    assert states.result["tokens"] == answers.tokens


def test_shards_hold_the_answers_that_were_generated_with_them(job):
    ctx = job.context("generate", 0, 6)

    commit = generate(ctx)

    answers = TokenSet.load(ctx.fetch(manifest(ctx, commit).file("answers.safetensors")))
    shards = ShardSet(ctx.store, [read_manifest(ctx.store, commit.also[0].manifest)], ctx.scratch)
    by_id = {sample.id: sample for sample in map(shards.sample, range(len(shards)))}
    assert sorted(by_id) == sorted(answers.ids)
    for i, name in enumerate(answers.ids):
        assert by_id[name].input_ids.tolist() == answers.sample(i)[0].tolist()
        assert by_id[name].loss_mask.tolist() == answers.sample(i)[1].tolist()
        assert by_id[name].task == answers.tasks[i]


def test_the_same_unit_commits_the_same_content(job):
    first, second = generate(job.context("generate", 0, 6)), generate(job.context("generate", 0, 6))

    assert first.output.manifest.content == second.output.manifest.content
    assert first.also[0].manifest.content == second.also[0].manifest.content


def test_extract_captures_generated_answers_again_by_prefill(job):
    generated = generate(job.context("generate", 0, 6))
    job.refs["generate"] = [generated.output.manifest]
    ctx = job.context("extract", 0, 6)

    commit = extract(ctx)

    decode, prefill = (
        ShardSet(ctx.store, [read_manifest(ctx.store, ref)], ctx.scratch)
        for ref in (generated.also[0].manifest, commit.output.manifest)
    )
    assert (decode.contract.capture_pass, prefill.contract.capture_pass) == ("decode", "prefill")
    again = {sample.id: sample for sample in map(prefill.sample, range(len(prefill)))}
    for sample in map(decode.sample, range(len(decode))):
        torch.testing.assert_close(again[sample.id].aux, sample.aux, rtol=2e-2, atol=2e-3)
        assert torch.equal(again[sample.id].final_index, sample.final_index)
    assert reduce("extract", ctx.spec, [commit.output.result])["samples"] == 6


def test_extract_without_regeneration_reads_a_slice_of_the_prepared_conversations(tmp_path):
    job = Job(tmp_path, regenerate=False)
    ctx = job.context("extract", 2, 5)

    commit = extract(ctx)

    shards = ShardSet(ctx.store, [manifest(ctx, commit)], ctx.scratch)
    assert sorted(shards.sample(i).id for i in range(len(shards))) == ["s2", "s3", "s4"]
    assert commit.output.result["supervised_tokens"] == 9


class SmallStore(LocalStore):
    """A store that says how much room it has."""

    free: int | None = None

    def free_bytes(self) -> int | None:
        return self.free


def stored_bytes(ctx: StageContext, output: Output) -> int:
    """Bytes of the tensors that were stored, headers and offsets of samples left out."""
    files = [load_file(ctx.fetch(f)) for f in read_manifest(ctx.store, output.manifest).files]
    return sum(t.nbytes for tensors in files for name, t in tensors.items() if name != "sample_offsets")


@pytest.mark.parametrize("regenerate", [True, False])
def test_the_bytes_that_are_foreseen_are_those_that_are_stored(tmp_path, regenerate):
    job = Job(tmp_path, regenerate=regenerate)
    ctx = job.context("generate" if regenerate else "extract", 0, 6)
    need = states_need(job.train, ctx.spec, 32)

    stored = stored_bytes(ctx, generate(ctx).also[0] if regenerate else extract(ctx).output)

    label = 32 * 2 + 4  # the last answer's end has nothing behind it, which is not foreseen
    assert need.least - 6 * label <= stored <= need.most


@pytest.mark.parametrize("regenerate", [True, False])
def test_a_slice_that_cannot_fit_is_refused_before_it_is_computed(tmp_path, regenerate):
    job, stage = Job(tmp_path, regenerate=regenerate), "generate" if regenerate else "extract"
    store = SmallStore(tmp_path / "store")
    ctx = job.context(stage, 0, 6, store=store)
    store.free = states_need(job.train, ctx.spec, 32).least - 1

    with pytest.raises(StoreTooSmall, match=r"need 0\.00 GB.*the store has 0\.00 GB left") as caught:
        (generate if regenerate else extract)(ctx)

    assert caught.value.pointer == "/data"
    assert ("a single token" in caught.value.detail) == regenerate
    assert not list(store.list("tenant/job/extract"))


def test_a_slice_that_may_not_fit_is_computed_and_said(job, tmp_path):
    store = SmallStore(tmp_path / "store")
    ctx = job.context("generate", 0, 6, store=store)
    need = states_need(job.train, ctx.spec, 32)
    store.free = (need.least + need.most) // 2

    generate(ctx)

    assert isinstance(ctx.reporter, RecordingReporter)
    assert "they fit if answers have about 6 tokens" in next(x.text for x in ctx.reporter.lines if x.level == "warning")


def test_units_share_one_loaded_verifier(job):
    generate(job.context("generate", 0, 2))
    held = list(WARM.held.values())

    generate(job.context("generate", 2, 4))

    assert list(WARM.held.values()) == held


def test_a_checkpoint_that_changed_since_the_job_was_posted_is_refused(job):
    job.sources = {"verifier": "0" * 64}

    with pytest.raises(VerifierChanged, match="the job was posted for 0000000000000000"):
        generate(job.context("generate", 0, 2))


def test_a_stage_that_is_asked_to_stop_stops_and_commits_nothing(job):
    ctx = job.context("generate", 0, 6)
    ctx.stop.set()

    with pytest.raises(Preempted):
        generate(ctx)
    assert not list(ctx.store.list("tenant/generate"))


def evaluated(job: Job) -> tuple[StageContext, Commit]:
    generated = generate(job.context("generate", 0, 6))
    job.refs["generate"] = [generated.output.manifest]
    ctx = job.context("evaluate", 1, 3)
    job.trained(contract_of(read_manifest(ctx.store, generated.also[0].manifest)))
    ctx = job.context("evaluate", 1, 3)
    return ctx, evaluate(ctx)


def test_evaluate_measures_its_prompts_and_keeps_times_out_of_what_keys_are_made_of(job):
    ctx, commit = evaluated(job)

    result, kept = commit.output.result, manifest(ctx, commit)
    assert [row["id"] for row in result["rows"]] == ["e1", "e2"]
    assert all(row["lossless"] for row in result["rows"])
    assert all(row["tokens"] == row["answer_tokens"] - 1 for row in result["rows"])
    assert result["costs"]["verify_1_ms"] > 0
    assert kept.summary == {"rows": result["rows"]}
    assert kept.timings["verify_1_ms"] == result["costs"]["verify_1_ms"]
    prompts = json.loads(ctx.fetch(kept.file("prompts.json")).read_text())
    assert [len(p["answer"]) for p in prompts] == [row["answer_tokens"] for row in result["rows"]]
    assert isinstance(ctx.reporter, RecordingReporter)
    assert (ctx.reporter.said[-1].done, ctx.reporter.said[-1].total, ctx.reporter.said[-1].unit) == (2, 2, "prompts")
    assert reduce("evaluate", ctx.spec, [result])["prompts"] == 2


@pytest.mark.parametrize("after", ["measure", "measure_costs"])
def test_a_verifier_replaced_while_evaluate_measures_is_refused(job, monkeypatch, after):
    """A verifier that is loaded may lie in mapped files: what was measured may be of either."""
    module = importlib.import_module("eagle3_core.stages.evaluate")
    call = getattr(module, after)

    def called(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        tiny_verifier(job.folder / "verifier", seed=1)
        return result

    monkeypatch.setattr(module, after, called)

    with pytest.raises(VerifierChanged, match=f"the job was posted for {job.identity.digest[:16]}"):
        evaluated(job)


def test_a_loaded_verifier_is_not_used_on_once_its_folder_holds_another(job):
    generate(job.context("generate", 0, 2))
    tiny_verifier(job.folder / "verifier", seed=1)
    other = inspect(job.folder / "verifier").digest

    with pytest.raises(VerifierChanged, match=f"is verifier {other[:16]}, the job was posted for"):
        generate(job.context("generate", 2, 4))


def test_a_verifier_replaced_while_it_is_loaded_is_refused_and_not_kept(job, monkeypatch):
    def replace(*args: Any, **kwargs: Any) -> Any:
        loaded = TransformersVerifier(*args, **kwargs)
        tiny_verifier(job.folder / "verifier", seed=1)
        return loaded

    monkeypatch.setattr("eagle3_core.stages.warm.TransformersVerifier", replace)
    ctx = job.context("generate", 0, 2)
    ctx.warm = Warm()

    with pytest.raises(VerifierChanged, match=f"the job was posted for {job.identity.digest[:16]}"):
        generate(ctx)
    assert not ctx.warm.held


def test_a_drafter_that_is_not_the_one_train_reported_is_not_measured(job):
    generated = generate(job.context("generate", 0, 6))
    job.refs["generate"] = [generated.output.manifest]
    job.trained(contract_of(read_manifest(job.context("evaluate", 0, 1).store, generated.also[0].manifest)))
    job.results["train"]["digest"] = "0" * 64

    with pytest.raises(ExportMismatch, match="train's result says 0000"):
        evaluate(job.context("evaluate", 0, 1))


def test_what_measures_with_another_engine_than_captured_is_said_in_the_job(job):
    ctx = job.context("generate", 0, 6)
    generated = generate(ctx)
    job.refs["generate"] = [generated.output.manifest]
    contract = contract_of(read_manifest(ctx.store, generated.also[0].manifest))
    job.trained(contract.model_copy(update={"engine_version": "0.1", "capture_pass": "prefill"}))
    ctx = job.context("evaluate", 0, 1)

    commit = evaluate(ctx)

    (warning,) = reduce("evaluate", ctx.spec, [commit.output.result])["warnings"][:1]
    assert warning.startswith("the hidden states differ in engine_version: 0.1 (the drafter), ")
    assert warning.endswith("(the running verifier)")
    assert contract_of(manifest(ctx, commit)).engine_version == contract.engine_version


def test_rates_are_drawn_from_the_stages_first_sample_on(job):
    ctx = job.context("generate", 2, 6)

    generate(ctx)

    assert isinstance(ctx.reporter, RecordingReporter)
    drawn = {m.name: (m.step, m.value) for m in ctx.reporter.metrics}
    assert sorted(drawn) == ["samples_per_s", "tokens_per_s"]
    assert {step for step, _ in drawn.values()} == {6}
    assert drawn["tokens_per_s"][1] > drawn["samples_per_s"][1] > 0
    assert ctx.reporter.said[-1].tokens_per_s == drawn["tokens_per_s"][1]


def test_a_drafter_of_other_layers_than_the_running_verifier_captures_is_refused_before_any_work(job):
    ctx = job.context("generate", 0, 1)
    generated = generate(ctx)
    contract = contract_of(read_manifest(ctx.store, generated.also[0].manifest))
    job.trained(contract.model_copy(update={"aux_layers": (1, 3, 5)}))

    with pytest.raises(ContractMismatch, match=r"the drafter has aux_layers=\(1, 3, 5\), the running verifier has"):
        evaluate(job.context("evaluate", 0, 2))
